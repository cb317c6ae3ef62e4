"""Every way to run a model over tree rows gives the logits of the model run plainly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from coppice.kernels.cpu import packed_linear
from drafter_svc.model import checkpoint, llama_forward
from drafter_svc.model.hf_forward import CachedForward, PlainForward
from drafter_svc.model.llama_forward import LlamaForward, is_supported
from drafter_svc.model.tree_cache import FloatArray, TreeCache

BASE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.4,
}
LLAMAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped heads": {"num_key_value_heads": 2},
    "one key head": {"num_key_value_heads": 1, "num_hidden_layers": 1},
    "tied": {"tie_word_embeddings": True},
    "wide heads": {"head_dim": 16},
    "another base": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
}


def make_llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**{**BASE, **changes})).eval()


def run_random_rounds(forward: Any, seed: int, prompt_tokens: int = 9) -> FloatArray:
    """Logits of prompts, trees and rollbacks drawn from a seed."""
    rng = np.random.default_rng(seed)
    cache = TreeCache(forward)
    logits = [cache.extend(rng.integers(0, 61, prompt_tokens).tolist())[None]]
    for _ in range(3):
        tokens: list[int] = []
        parents: list[int] = []
        depths: list[int] = []
        for width in rng.integers(1, 5, 3).tolist():
            # Tokens of one call differ, and depth 1 to 3 uses other tokens: siblings never repeat.
            chosen = rng.choice(20, width, replace=False) + 20 * (len(depths) > 0) * rng.integers(1, 3)
            rows = [int(rng.integers(-1, len(tokens))) for _ in range(width)]
            new_depths = [1 if row == -1 else depths[row] + 1 for row in rows]
            logits.append(cache.grow(chosen.tolist(), rows, new_depths))
            tokens += chosen.tolist()
            parents += rows
            depths += new_depths
        node, path = int(rng.integers(0, len(tokens))), []
        while node != -1:
            path.append(tokens[node])
            node = parents[node]
        cache.follow(path[::-1])
        logits.append(cache.extend(rng.integers(0, 61, int(rng.integers(1, 4))).tolist())[None])
    return np.concatenate(logits)


@pytest.mark.parametrize("changes", LLAMAS.values(), ids=LLAMAS.keys())
def test_the_lean_pass_gives_the_logits_of_the_model(changes: dict[str, Any]) -> None:
    model = make_llama(**changes)
    assert is_supported(model)
    for seed in range(3):
        expected = run_random_rounds(PlainForward(model), seed)
        assert np.abs(run_random_rounds(LlamaForward(model), seed) - expected).max() < 2e-4


@pytest.mark.parametrize("family", ["gpt2", "mistral with a window"])
def test_the_cached_pass_gives_the_logits_of_the_model(family: str) -> None:
    torch.manual_seed(2)
    model = (
        GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=64))
        if family == "gpt2"
        else MistralForCausalLM(MistralConfig(**BASE, sliding_window=48))
    ).eval()
    for seed in range(3):
        expected = run_random_rounds(PlainForward(model), seed)
        assert np.abs(run_random_rounds(CachedForward(model), seed) - expected).max() < 2e-4
    assert isinstance(checkpoint.choose_forward(model), CachedForward)


def test_a_llama_gets_the_lean_pass(llama: LlamaForCausalLM) -> None:
    assert isinstance(checkpoint.choose_forward(llama), LlamaForward)


def test_the_lean_pass_works_in_bfloat16() -> None:
    model = make_llama(num_key_value_heads=2, initializer_range=0.1).to(torch.bfloat16)
    assert isinstance(checkpoint.choose_forward(model), LlamaForward)


def test_a_llama_with_other_rotary_positions_gets_the_cached_pass() -> None:
    model = make_llama(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0})
    assert isinstance(checkpoint.choose_forward(model), CachedForward)


def test_a_lean_pass_that_deviates_is_not_used(llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = llama_forward._rotary_tables

    def wrong(model: LlamaForCausalLM, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = tables(model, length)
        return cos, -sin

    monkeypatch.setattr(llama_forward, "_rotary_tables", wrong)
    assert isinstance(checkpoint.choose_forward(llama), CachedForward)


def test_a_model_that_ignores_our_mask_is_computed_path_by_path(
    llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "is_supported", lambda model: False)
    monkeypatch.setattr(CachedForward, "keep", lambda self, store, first, rows: None)
    assert isinstance(checkpoint.choose_forward(llama), PlainForward)


def test_a_long_prompt_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch, llama: LlamaForCausalLM) -> None:
    prompt = list(range(40))
    whole = TreeCache(LlamaForward(llama)).extend(prompt)
    monkeypatch.setattr("drafter_svc.model.tree_cache.PIECE_ROWS", 7)
    monkeypatch.setattr(llama_forward, "CAPACITY_STEP", 16)
    assert np.abs(TreeCache(LlamaForward(llama)).extend(prompt) - whole).max() < 2e-4


def test_a_pass_that_fails_leaves_no_rows(monkeypatch: pytest.MonkeyPatch, llama: LlamaForCausalLM) -> None:
    forward = LlamaForward(llama)
    cache = TreeCache(forward)
    cache.extend([3, 1, 4])
    expected = cache.grow([5, 9], [-1, -1], [1, 1])

    def fails(store: object, rows: object) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(forward, "run", fails)
        with pytest.raises(MemoryError):
            cache.grow([2, 6], [0, 1], [2, 2])
    assert (cache.num_rows, cache.find(0, 2), cache.find(1, 6)) == (2, None, None)
    again = TreeCache(forward)
    again.extend([3, 1, 4])
    assert np.array_equal(again.grow([5, 9], [-1, -1], [1, 1]), expected)
    assert np.array_equal(cache.grow([7], [1], [2]), again.grow([7], [1], [2]))


@pytest.mark.parametrize("rows", [1, 2, 5], ids="{} rows".format)
@pytest.mark.parametrize("shape", [(40, 24), (1000, 700)], ids=str)
def test_packed_weights_multiply_like_plain_ones(shape: tuple[int, int], rows: int) -> None:
    torch.manual_seed(rows)
    weight, inputs = torch.randn(shape) / 10, torch.randn(rows, shape[1])
    with torch.inference_mode():
        assert torch.allclose(packed_linear.make_linear(weight)(inputs), inputs @ weight.T, atol=1e-4)


def test_weights_stay_plain_where_packing_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "packed_product", lambda weight: None)
    weight, inputs = torch.randn(8, 4), torch.randn(3, 4)
    assert torch.allclose(packed_linear.make_linear(weight)(inputs), inputs @ weight.T, atol=1e-5)
