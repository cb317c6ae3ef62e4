"""A checkpoint on disk: bf16 weights that load again, and a card with the facts that tests/repo asks for."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from coppice.training.checkpoint import save_checkpoint
from coppice.training.corpus import SourceFile
from coppice.training.loop import LoopConfig, Schedule, TrainingLoop
from coppice.training.token_store import TokenStore
from coppice.training.tokenizer import train_tokenizer


@dataclass(frozen=True)
class Recipe:
    steps: int = 3
    seed: int = 11


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of a few steps, saved by a command line that trained it."""
    monkeypatch.setattr("sys.argv", ["coppice", "train", "target", "--steps", "3"])
    files = [SourceFile("a.py", "def add(left, right):\n    return left + right\n" * 20)]
    train_tokenizer(files, tmp_path / "tokenizer", vocab_size=300)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "tokenizer")
    ids = np.array(tokenizer.encode(files[0].text), np.uint16)
    store = TokenStore(ids, ids, len(files[0].text))
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=64,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
        )
    )

    def loss(runner: nn.Module, step: int) -> Tensor:
        batch = store.training_batch(0, step, rows=2, length=16)
        value: Tensor = runner(input_ids=batch, labels=batch, use_cache=False).loss
        return value

    config = LoopConfig(Schedule(3, 1e-3), tmp_path / "state", use_compiler=False)
    loop = TrainingLoop(model, loss, lambda runner: loss(runner, 99).item(), config)
    loop.run()
    out = tmp_path / "out"
    save_checkpoint(model, tokenizer, out, title="Tiny target", recipe=Recipe(), store=store, loop=loop)
    return out


def test_a_checkpoint_loads_again_and_its_card_has_the_facts(checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert model.config.model_type == "llama"
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert (checkpoint / "tokenizer.json").is_file()
    assert (checkpoint / "validation_curve.png").stat().st_size > 1000

    card = (checkpoint / "README.md").read_text()
    assert "`coppice train target --steps 3`" in card
    assert "| seed | 11 |" in card
    assert "| steps | 3 |" in card
    assert re.search(r"\d\.\d+ bits per byte", card)
    assert re.search(r"20\d\d-\d\d-\d\d", card)

    record = json.loads((checkpoint / "recipe.json").read_text())
    [last] = record["curve"]
    bytes_per_token = record["held_out_loss"] / math.log(2) / record["bits_per_byte"]
    assert record["held_out_loss"] == last["held_out"]
    assert bytes_per_token > 1
    assert record["recipe"] == {"steps": 3, "seed": 11}


def test_whoever_may_read_new_files_may_read_the_weights(checkpoint: Path) -> None:
    other = checkpoint.parent / "another file"
    other.write_text("")
    modes = {path.name: path.stat().st_mode for path in checkpoint.iterdir()}
    assert "model.safetensors" in modes
    assert set(modes.values()) == {other.stat().st_mode}
