"""Drafters that read prompts on the verifier's cores: what that takes counts against drafts."""

from __future__ import annotations

import pytest

from tests.unit.orchestrator.planner.shared_cores import Drafter, SharedCores

NUM_REQUESTS, NUM_TOKENS = 16, 20_000


def speed(drafters: dict[str, Drafter], reading_row_s: float) -> float:
    one = SharedCores(drafters, NUM_REQUESTS, reading_row_s=reading_row_s, are_apart=True)
    one.run(4000)
    return one.run(NUM_TOKENS)


@pytest.mark.parametrize("right", [0.6, 0.7, 0.8])
@pytest.mark.parametrize("reading_row_s", [3e-5, 6e-5, 1e-4])
def test_drafts_that_cost_more_than_they_bring_by_prompts_alone_are_not_asked_for(
    right: float, reading_row_s: float
) -> None:
    # Between two prompts, drafts pay: they give 1.1 to 1.6 times the tokens.
    assert speed({"one": Drafter(right, 0.0003)}, reading_row_s) >= 0.97 * speed({}, 0.0)


@pytest.mark.parametrize("right", [0.7, 0.8])
def test_prompts_that_take_no_longer_do_not_count_against_drafts(right: float) -> None:
    assert speed({"one": Drafter(right, 0.0003)}, 0.0) >= 1.3 * speed({}, 0.0)
