"""A step of the load whose prompts the verifier has to read, and drafters, too."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

import pytest

from coppice.lab.simulator.policies import LINGER_US, MAX_NODES, Policy
from orchestrator.planner.adaptive import AdaptivePlanner
from orchestrator.planner.base import RoundContext
from orchestrator.planner.load import FEW_PROMPTS, LONGEST_S, PrefillPressure
from orchestrator.request.rounds import VerifierLoad
from tests.unit.orchestrator.planner.drawn_text import Predictability
from tests.unit.orchestrator.planner.endless_load import MACHINE, EndlessLoad

OFF, PLANNER = Policy("off"), Policy("planner")
PROMPT_TOKENS = 232
# So many rows of prompts in a pass, of all sequences together.
READING = replace(MACHINE, verifier=replace(MACHINE.verifier, prefill_chunk=256))
BIN_S = 0.25


def planned(seed: int) -> EndlessLoad:
    return EndlessLoad(PLANNER.planner(), PLANNER, Predictability(), seed, READING, PROMPT_TOKENS)


def plain(seed: int) -> EndlessLoad:
    return EndlessLoad(OFF.planner(), OFF, Predictability(), seed, READING, PROMPT_TOKENS)


def step(deployment: EndlessLoad) -> tuple[list[float], list[float], list[float]]:
    """Tokens per second in bins of the 64 and of the one behind it, and times to the first token of the 64."""
    deployment.set_load(1)
    deployment.run(4.0)
    deployment.set_load(64)
    many = [deployment.run(BIN_S) for _ in range(32)]
    first_tokens = [seen.first_token_s for seen in deployment.seen[1:] if seen.first_token_s is not None]
    deployment.set_load(1)
    one = [deployment.run(BIN_S) for _ in range(32)]
    return many, one, first_tokens


def over_a_second(bins: Sequence[float]) -> list[float]:
    """Running means."""
    return [statistics.mean(bins[at : at + 4]) for at in range(len(bins) - 3)]


@pytest.mark.parametrize("seed", range(2))
def test_a_step_with_prompts_to_read_settles_as_soon_as_they_are_read_and_never_collapses(seed: int) -> None:
    many, one, first_tokens = step(planned(seed))
    off_many, off_one, off_first_tokens = step(plain(seed))
    assert len(first_tokens) == len(off_first_tokens) == 63
    # All are read about as soon as without drafts, but for those that were being made when the others came.
    assert statistics.median(first_tokens) <= 1.07 * statistics.median(off_first_tokens)
    assert max(first_tokens) <= 1.04 * max(off_first_tokens)
    # While prompts are read.
    num_bins, off_bins = (math.floor(max(each) / BIN_S) for each in (first_tokens, off_first_tokens))
    assert min(over_a_second(many[:num_bins])) >= 0.9 * min(over_a_second(off_many[:off_bins]))
    assert statistics.mean(many[:num_bins]) >= 0.95 * statistics.mean(off_many[:off_bins])
    # From then on.
    num_bins += 2
    means = over_a_second(many[num_bins:])
    assert max(abs(mean / statistics.median(means) - 1) for mean in means) <= 0.15
    assert statistics.median(means) >= 0.9 * statistics.median(off_many[num_bins:])
    # And back.
    assert statistics.mean(one[:8]) >= 0.7 * statistics.mean(one[8:])
    assert min(over_a_second(one)) >= 1.5 * statistics.median(off_one)


def crowd(num_unread: int) -> tuple[AdaptivePlanner, list[int]]:
    """A planner whose requests begin all at once, and the nodes that their first rounds ask for."""
    planner = AdaptivePlanner(MAX_NODES, LINGER_US, clock=itertools.repeat(1.0).__next__)
    round_context = RoundContext(has_drafter=True, row_multiple=MACHINE.verifier.row_multiple)
    return planner, [planner.follow(is_greedy=True).plan(round_context).max_nodes for _ in range(num_unread)]


@pytest.mark.parametrize("num_unread", [1, 4, 60])
def test_of_many_that_begin_at_once_the_first_few_ask_for_drafts(num_unread: int) -> None:
    planner, nodes = crowd(num_unread)
    assert [count > 0 for count in nodes] == [at < FEW_PROMPTS for at in range(num_unread)]
    assert planner.num_newcomers == min(num_unread, FEW_PROMPTS)


@pytest.mark.parametrize("num_queued", [0, FEW_PROMPTS, FEW_PROMPTS + 1])
def test_a_queue_of_others_keeps_from_drafting_too(num_queued: int) -> None:
    planner = AdaptivePlanner(MAX_NODES, LINGER_US, clock=itertools.repeat(1.0).__next__)
    round_context, load = RoundContext(has_drafter=True), VerifierLoad(batch_size=9, queued_sequences=num_queued)
    assert (planner.follow(is_greedy=True).plan(round_context, load).max_nodes > 0) == (num_queued <= FEW_PROMPTS)


def test_sequences_that_wait_for_room_keep_nobody_from_drafting_for_long() -> None:
    now_s = 0.0
    reading = PrefillPressure(lambda: now_s)

    def is_crowded(num_unread: int) -> bool:
        reading.num_unread = num_unread
        return reading.is_crowded()

    assert not is_crowded(FEW_PROMPTS)
    assert is_crowded(FEW_PROMPTS + 1)
    now_s = LONGEST_S
    assert is_crowded(100)
    now_s += 0.1
    assert not is_crowded(100)
    # The clock starts anew when few are left.
    assert not is_crowded(1)
    assert is_crowded(100)
    # Of many it waits for the last.
    assert is_crowded(1)
    assert not is_crowded(0)
    assert not is_crowded(1)
