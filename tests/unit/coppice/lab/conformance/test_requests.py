"""Requests from names: each value goes where the contract has its field."""

from __future__ import annotations

import json

import pytest

from coppice.lab.conformance.requests import FORCED, build, described, varied


def test_values_go_where_their_fields_are() -> None:
    request = build([5, 6], temperature=0.5, logit_bias={7: 1.5}, max_tokens=3, mode=FORCED, resume_token_ids=[8])
    assert list(request.token_ids.ids) == [5, 6]
    assert request.sampling.temperature == 0.5
    assert dict(request.sampling.logit_bias) == {7: 1.5}
    assert request.stopping.max_tokens == 3
    assert request.speculation.mode == FORCED
    assert list(request.resume_token_ids) == [8]


def test_a_value_that_is_a_default_is_set_all_the_same() -> None:
    request = build("x", seed=0, max_nodes=0, ignore_eos=False)
    assert request.sampling.HasField("seed")
    assert request.speculation.HasField("max_nodes")
    assert request.stopping.HasField("ignore_eos")


def test_varying_replaces_lists_and_leaves_the_first_request_as_it_was() -> None:
    first = build("x", stop_strings=["a", "b"], top_k=3)
    second = varied(first, stop_strings=["c"])
    assert list(first.stopping.stop_strings) == ["a", "b"]
    assert list(second.stopping.stop_strings) == ["c"]
    assert second.sampling.top_k == 3


def test_an_unknown_name_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="no_such_field"):
        build("x", no_such_field=1)


def test_a_request_is_described_on_one_line_that_is_json() -> None:
    text = described(build("a\nb", top_k=3))
    assert "\n" not in text
    assert json.loads(text) == {"prompt": "a\nb", "sampling": {"top_k": 3}}
