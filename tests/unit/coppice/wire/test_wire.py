"""Sampling parameters and stopping options across the wire. (Trees: test_tree.py.)"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coppice.core.errors import InvalidRequestError, InvalidTreeError
from coppice.core.grammar import Grammar, GrammarKind
from coppice.core.sampling import SamplingParams, StoppingOptions
from coppice.core.tree import MAX_TREE_NODES
from coppice.v1 import sampling_pb2, tree_pb2
from coppice.wire.convert import (
    samples_drafts,
    sampling_from_proto,
    sampling_to_proto,
    stopping_from_proto,
    stopping_to_proto,
    tree_from_proto,
)

TOKENS = st.integers(0, 2**32 - 1)
GRAMMAR = st.builds(
    Grammar, st.sampled_from(GrammarKind), st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=64)
)
SAMPLING = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100, width=32),
    top_k=TOKENS,
    top_p=st.floats(0, 1, width=32, exclude_min=True),
    min_p=st.floats(0, 1, width=32),
    repetition_penalty=st.floats(0, 100, width=32, exclude_min=True),
    presence_penalty=st.floats(-2, 2, width=32),
    frequency_penalty=st.floats(-2, 2, width=32),
    logit_bias=st.dictionaries(TOKENS, st.floats(-100, 100, width=32), max_size=4),
    allowed_token_ids=st.lists(TOKENS, max_size=4).map(tuple),
    bad_token_ids=st.lists(TOKENS, max_size=4).map(tuple),
    seed=st.integers(0, 2**64 - 1),
    grammar=st.none() | GRAMMAR,
)
STOP_STRING = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=64)
STOPPING = st.builds(
    StoppingOptions,
    max_tokens=st.none() | st.integers(8, 2**32 - 1),
    min_tokens=st.integers(0, 8),
    stop_strings=st.lists(STOP_STRING, max_size=3).map(tuple),
    stop_token_ids=st.lists(TOKENS, max_size=3).map(tuple),
    ignore_eos=st.booleans(),
)


@given(SAMPLING)
def test_sampling_parameters_survive_the_wire(params: SamplingParams) -> None:
    data = sampling_to_proto(params).SerializeToString()
    assert sampling_from_proto(sampling_pb2.SamplingParams.FromString(data)) == params


@given(STOPPING)
def test_stopping_options_survive_the_wire(options: StoppingOptions) -> None:
    data = stopping_to_proto(options).SerializeToString()
    assert stopping_from_proto(sampling_pb2.StoppingOptions.FromString(data)) == options


def test_what_is_unset_takes_its_default() -> None:
    assert sampling_from_proto(sampling_pb2.SamplingParams()) == SamplingParams()
    assert stopping_from_proto(sampling_pb2.StoppingOptions()) == StoppingOptions()


def test_a_zero_that_is_set_is_not_taken_for_unset() -> None:
    with pytest.raises(InvalidRequestError, match="top_p"):
        sampling_from_proto(sampling_pb2.SamplingParams(top_p=0.0))


def test_a_value_out_of_range_is_refused_at_the_door() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        sampling_from_proto(sampling_pb2.SamplingParams(temperature=-1.0))
    assert caught.value.field == "sampling.temperature"


def test_drafts_are_sampled_for_traversal_above_temperature_0_alone() -> None:
    rules = sampling_pb2.AcceptanceRule.values()
    asked = {(rule, temperature) for rule in rules for temperature in (0.0, 0.5) if samples_drafts(rule, temperature)}
    assert asked == {(sampling_pb2.ACCEPTANCE_RULE_TRAVERSAL, 0.5)}


def test_a_tree_of_more_nodes_than_any_budget_is_refused_before_it_is_looked_at() -> None:
    message = tree_pb2.TokenTree(token_ids=range(MAX_TREE_NODES + 1), parents=range(-1, MAX_TREE_NODES))
    with pytest.raises(InvalidTreeError, match="4097 nodes; the most are 4096"):
        tree_from_proto(message)
    del message.token_ids[-1], message.parents[-1]
    assert len(tree_from_proto(message)) == MAX_TREE_NODES


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"parents": [-1] * 9}, "2 nodes and a list of 9 entries"),
        ({"log_probs": [0.0] * 9}, "2 nodes and a list of 9 entries"),
        ({"sources": [1] * 9}, "2 nodes and a list of 9 entries"),
        ({"distribution_sizes": [0] * 4}, "2 nodes and a list of 3 entries"),
        ({"source_names": ["x"] * 33}, "33 sources; the most are 32"),
    ],
)
def test_a_tree_with_lists_longer_than_its_nodes_is_refused_before_they_are_read(
    fields: dict[str, Any], told: str
) -> None:
    message = tree_pb2.TokenTree(**{"token_ids": [1, 2], "parents": [-1, 0], **fields})
    with pytest.raises(InvalidTreeError, match=told):
        tree_from_proto(message)
