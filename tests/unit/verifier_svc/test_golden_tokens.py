"""Tokens of every seed are those that were recorded, with drafts and without."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.unit.verifier_svc.engine_harness import Harness
from tests.unit.verifier_svc.golden_tokens import BYTE_VOCAB, GOLDEN, LARGE_VOCAB, ask, golden_engine, golden_requests


@pytest.fixture(params=[BYTE_VOCAB, LARGE_VOCAB], scope="module")
def served(request: pytest.FixtureRequest) -> Iterator[tuple[int, Harness]]:
    engine = golden_engine(request.param)
    engine.start()
    yield request.param, Harness(engine)
    engine.stop()


def test_tokens_of_every_seed_are_those_recorded(served: tuple[int, Harness]) -> None:
    vocab_size, harness = served
    recorded = json.loads(GOLDEN.read_text(encoding="utf-8"))
    num_accepted = 0
    for number, request in enumerate(golden_requests()):
        if request.vocab_size != vocab_size:
            continue
        expected = recorded[number]
        for known in (None, expected["token_ids"]):
            answer = ask(harness, request, known)
            assert answer.token_ids == expected["token_ids"], f"request {number}, drafted: {known is not None}"
            assert (answer.finish and answer.finish.reason.value) == expected["finish"]
            assert (answer.error and answer.error.message) == expected["error"]
            num_accepted += answer.accepted
    assert num_accepted > 100, "drafts were verified, too"
