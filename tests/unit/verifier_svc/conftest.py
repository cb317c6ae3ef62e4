"""Tiny random models of several families, and the door of a verifier of sampled trees."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from coppice.core.chance import Chance, Purpose
from tests.unit.verifier_svc.tiny_engine import VOCAB, tiny_engine
from tests.unit.verifier_svc.traversal_door import PROMPT, Door
from verifier_svc.engine.engine import Engine
from verifier_svc.verify import round_verifier

FAMILIES = {
    "llama": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 16},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 24},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512},
    "gpt_neox": {},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},
}


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tests share the machine: one thread each."""
    torch.set_num_threads(1)


@pytest.fixture
def new_model() -> Callable[[str], PreTrainedModel]:
    """Builds a tiny random model of a family; weights are wide, so that logits differ clearly."""

    def build(family: str) -> PreTrainedModel:
        shape = {
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 512,
            "initializer_range": 0.2,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **{**shape, **FAMILIES[family]})
        return AutoModelForCausalLM.from_config(config).eval()

    return build


@pytest.fixture
def engine(new_model: Callable[[str], PreTrainedModel]) -> Iterator[Engine]:
    engine = tiny_engine(new_model("llama"))
    engine.start()
    yield engine
    engine.stop()
    cache = engine.cache
    assert cache.num_free_blocks == cache.num_blocks, "a block leaked"


@pytest.fixture
def door() -> Iterator[Door]:
    door = Door()
    yield door
    door.step()
    cache = door.engine.cache
    assert cache.num_free_blocks == cache.num_blocks, "a block leaked"


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Chance]:
    """The chance that rounds of acceptance use is the last of this list."""
    chances: list[Chance] = []

    def told_chance(seed: int, position: int, purpose: Purpose) -> Chance:
        assert (seed, purpose) == (7, Purpose.ACCEPTANCE)
        assert position == len(PROMPT)
        return chances[-1]

    monkeypatch.setattr(round_verifier, "seeded_chance", told_chance)
    return chances
