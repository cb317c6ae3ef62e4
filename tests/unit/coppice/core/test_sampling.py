"""Sampling and stopping parameters: every limit is enforced, and the error names the field."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coppice.core.errors import InvalidRequestError
from coppice.core.sampling import (
    MAX_STOP_STRING_BYTES,
    MAX_STOP_STRINGS,
    MAX_TOKEN_LIST,
    SamplingParams,
    StoppingOptions,
    check_token_ids,
    output_seed,
)

TOO_MANY = tuple(range(MAX_TOKEN_LIST + 1))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 100.5),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 101.0),
        ("repetition_penalty", math.nan),
        ("presence_penalty", 2.1),
        ("presence_penalty", -math.inf),
        ("frequency_penalty", -2.1),
        ("logit_bias", {3: 101.0}),
        ("logit_bias", {3: math.nan}),
        ("logit_bias", dict.fromkeys(TOO_MANY, 1.0)),
        ("allowed_token_ids", TOO_MANY),
        ("bad_token_ids", TOO_MANY),
        ("seed", -1),
        ("seed", 2**64),
    ],
)
def test_a_sampling_parameter_out_of_range_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == f"sampling.{field}"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0.0),
        ("temperature", 100.0),
        ("top_k", 2**32 - 1),
        ("top_p", 1.0),
        ("min_p", 1.0),
        ("presence_penalty", -2.0),
        ("frequency_penalty", 2.0),
        ("logit_bias", {0: -100.0, 1: 100.0}),
        ("allowed_token_ids", TOO_MANY[:-1]),
        ("seed", 2**64 - 1),
    ],
)
def test_the_ends_of_each_range_are_allowed(field: str, value: Any) -> None:
    assert getattr(SamplingParams(**{field: value}), field) == value


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
        ({"stop_strings": ("",)}, "stop_strings"),
        ({"stop_strings": ("x" * (MAX_STOP_STRING_BYTES + 1),)}, "stop_strings"),
        ({"stop_strings": ("€" * (MAX_STOP_STRING_BYTES // 2),)}, "stop_strings"),
        ({"stop_strings": ("x",) * (MAX_STOP_STRINGS + 1)}, "stop_strings"),
        ({"stop_token_ids": TOO_MANY}, "stop_token_ids"),
    ],
)
def test_a_stopping_option_out_of_range_is_refused_by_name(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        StoppingOptions(**options)
    assert caught.value.field == f"stopping.{field}"


def test_ids_outside_the_vocabulary_are_refused_with_their_place() -> None:
    check_token_ids("token_ids", (0, 9), vocab_size=10)
    with pytest.raises(InvalidRequestError, match="entry 1 is 10, outside the vocabulary of 10"):
        check_token_ids("token_ids", (0, 10), vocab_size=10)


def test_every_field_that_names_tokens_is_listed_for_checking() -> None:
    params = SamplingParams(logit_bias={1: 0.5}, allowed_token_ids=(2,), bad_token_ids=(3,))
    assert set(params.named_token_ids().values()) == {(1,), (2,), (3,)}


@pytest.mark.parametrize("field", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_each_penalty_counts_as_one(field: str) -> None:
    assert not SamplingParams().has_penalties
    assert SamplingParams(**{field: 0.5}).has_penalties  # type: ignore[arg-type]


SEEDS = st.integers(0, 2**64 - 1)


def test_vectors() -> None:
    assert [output_seed(7, index) for index in range(3)] == [7, 11400714819323198492, 4354685564936845361]
    assert output_seed(2**64 - 1, 1) == 11400714819323198484


@given(SEEDS)
def test_the_first_output_has_the_seed_itself(seed: int) -> None:
    assert output_seed(seed, 0) == seed


@given(SEEDS, st.integers(0, 1000))
def test_requests_with_neighbouring_seeds_share_none(seed: int, distance: int) -> None:
    """One request's outputs all differ, and from those of another whose seed is near."""
    seeds = {output_seed((seed + apart) % 2**64, index) for apart in {0, distance} for index in range(64)}
    assert len(seeds) == (64 if distance == 0 else 128)
    assert all(0 <= one < 2**64 for one in seeds)
