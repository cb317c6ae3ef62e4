"""What is refused of loaded tensors, what is let pass, and how it is told."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from coppice.checkpoints.loaded_weights import (
    is_finite,
    refuse_incomplete,
    refuse_not_finite,
    refuse_other_names,
    refuse_untied,
)
from coppice.core.errors import IncompatibleError

EXPECTED = [f"model.layers.{layer}.{part}.weight" for layer in range(4) for part in ("mlp", "norm")] + [
    "lm_head.weight"
]


def check(
    missing: tuple[str, ...] = (), unexpected: tuple[str, ...] = (), mismatched: tuple[Any, ...] = (), **config: Any
) -> None:
    found = {"missing_keys": set(missing), "unexpected_keys": set(unexpected), "mismatched_keys": set(mismatched)}
    refuse_incomplete("MODEL", found, EXPECTED, SimpleNamespace(**{"num_hidden_layers": 4, **config}), ("own.before",))


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "transformer.h.3.attn.bias",
        "transformer.h.3.attn.masked_bias",
        "gpt_neox.layers.1.attention.masked_bias",
        "model.embeddings.position_ids",
        "mtp.layers.0.mlp.weight",
        "own.before",
    ],
)
def test_tensors_that_say_nothing_of_their_own_are_let_pass(name: str) -> None:
    check(unexpected=(name,))


@pytest.mark.parametrize(
    "name", ["model.layers.0.attn.bias.weight", "model.layers.0.mlp.bias", "own.behind", "inv_freqs"]
)
def test_others_are_not(name: str) -> None:
    with pytest.raises(IncompatibleError, match=f"has 1 tensor .{name}. that its model has no place for"):
        check(unexpected=(name,))


def test_layers_that_predict_further_tokens_are_let_pass_where_config_json_says_how_many() -> None:
    check(unexpected=("model.layers.4.mlp.weight",), num_nextn_predict_layers=1)
    for count in (0, 1, None):
        with pytest.raises(
            IncompatibleError, match=r"num_hidden_layers of config.json is 4, and there are more layers"
        ):
            check(unexpected=("model.layers.5.mlp.weight",), num_nextn_predict_layers=count)


def test_five_names_are_told_and_how_many_more_there_are() -> None:
    with pytest.raises(IncompatibleError) as told:
        check(unexpected=tuple(f"x{number}" for number in range(7)))
    assert "7 tensors (x0, x1, x2, x3, x4 and 2 more)" in str(told.value)


@pytest.mark.parametrize(
    ("missing", "unexpected", "hint"),
    [
        (("lm_head.weight",), (), "does not tie it to the embeddings"),
        (EXPECTED[:4], (), "all of layer 0, 1: is a shard missing"),
        # Not all of a layer.
        (EXPECTED[:1], (), "of its model$"),
        ((*EXPECTED[:2], "lm_head.weight"), (), "of its model$"),
        (EXPECTED, [f"base_model.model.{name}" for name in EXPECTED], "'base_model.model.': are these adapters"),
        (EXPECTED, [f"module.{name}" for name in EXPECTED], "'module.': save the model that is inside the wrapper"),
        (EXPECTED[:1], ["base_model.model.layers.0.mlp.lora_A.weight"], "are these adapters"),
        (EXPECTED, [f"module.{name}" for name in EXPECTED[:3]], "of its model$"),
    ],
)
def test_the_hint_fits_what_is_missing(missing: Any, unexpected: Any, hint: str) -> None:
    with pytest.raises(IncompatibleError, match=hint):
        check(tuple(missing), tuple(unexpected))


def test_the_hint_to_the_vocabulary_is_given_where_all_else_fits() -> None:
    wide, narrow = torch.Size([9, 4]), torch.Size([8, 4])
    with pytest.raises(IncompatibleError, match=r"lm_head.weight \[9, 4\] instead of \[8, 4\]\) .* does vocab_size"):
        check(mismatched=(("lm_head.weight", wide, narrow),))
    with pytest.raises(IncompatibleError, match=r"than config.json says$"):
        check(mismatched=(("lm_head.weight", wide, torch.Size([9, 5])),))


def test_tensors_that_are_tied_have_to_be_one() -> None:
    one, other = torch.ones(2), torch.ones(2)
    refuse_untied("MODEL", [("lm_head.weight", one, one)])
    with pytest.raises(IncompatibleError, match=r"lm_head.weight. other than the embeddings"):
        refuse_untied("MODEL", [("lm_head.weight", one, other)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e5m2])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_found_anywhere(dtype: torch.dtype, value: float) -> None:
    for place in (0, 6, 14):
        numbers = torch.linspace(-3, 3, 15).reshape(3, 5)
        assert is_finite(numbers.to(dtype))
        numbers.view(-1)[place] = value
        assert not is_finite(numbers.to(dtype))
        assert not is_finite(numbers.to(dtype).T)


def test_tensors_of_other_kinds_and_empty_ones_are_finite() -> None:
    assert is_finite(torch.tensor([1, 2]))
    assert is_finite(torch.empty(0))
    with pytest.raises(IncompatibleError, match=r"WHAT has NaN or infinity in 1 tensor .b."):
        refuse_not_finite("WHAT", [("a", torch.ones(2)), ("b", torch.tensor([1.0, math.nan]))])


def test_names_have_to_be_those_expected() -> None:
    refuse_other_names("WHAT", ["a", "b", "c"], ["a", "b"], ["c", "d"])
    with pytest.raises(IncompatibleError, match=r"WHAT lacks 1 tensor .b."):
        refuse_other_names("WHAT", ["a", "x"], ["a", "b"])
    with pytest.raises(IncompatibleError, match=r"WHAT has 1 tensor .x. that are not used"):
        refuse_other_names("WHAT", ["a", "x"], ["a"])
