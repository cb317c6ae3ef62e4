"""A step of the load whose prompts the verifier has to read, and drafters, too."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence

import pytest

from coppice.tree import EMPTY_TREE, TokenTree
from orchestrator.planner import FixedPlanner, Load, Planner, Situation
from orchestrator.planning.adaptive import AdaptivePlanner
from orchestrator.planning.reading import FEW_PROMPTS, LONGEST_S, Reading
from tests.unit.orchestrator.planning.modelled_deployment import ROW_MULTIPLE, Deployment, ModelledRequest, pass_s

MAX_NODES, LINGER_US = 15, 40_000
PROMPT_TOKENS = 232
# Rows of prompts in a pass, of all sequences together.
CHUNK = 256
BIN_S = 0.25


class ReadingDeployment(Deployment):
    """Requests begin with a prompt, which passes read in chunks, first come first served, and wait for nobody then.

    Drafters read prompts as in the model itself: all of it before the first draft.
    """

    def __init__(self, planner: Callable[[Callable[[], float]], Planner], mode: str, seed: int) -> None:
        super().__init__(planner, mode, seed=seed)
        self._unread: dict[ModelledRequest, int] = {}
        self._begun_s: dict[ModelledRequest, float] = {}
        self.first_token_s: list[float] = []

    def _look(self) -> None:
        for request in self.requests:
            if request not in self._begun_s:
                self._begun_s[request], self._unread[request] = self.now_s, PROMPT_TOKENS
        self._unread = {request: left for request, left in self._unread.items() if request.is_running}
        if self._in_pass or not self._unread:
            super()._look()
            return
        room, ends = CHUNK, set()
        for request in list(self._unread):
            taken = min(room, self._unread[request])
            room -= taken
            self._unread[request] -= taken
            if not self._unread[request]:
                del self._unread[request]
                ends.add(request)
        reads = {*self._unread, *ends}
        rounds = [one for one in self.requests if one not in reads and (one.has_draft or one.deadline_s <= self.now_s)]
        trees = {request: (request.tree or EMPTY_TREE).prune(request.plan.max_nodes or 15) for request in rounds}
        self._in_pass = [(request, tree, self.now_s - request.last_outcome_s) for request, tree in trees.items()]
        self._in_pass += [(request, EMPTY_TREE, 0.0) for request in ends]
        self._pass_rows = CHUNK - room + sum(1 + len(tree) for tree in trees.values())
        slow = math.exp(self._random.gauss(0, self.machine.noise))
        plain_s = pass_s(self._pass_rows) * slow
        self._pass_s = plain_s + self.machine.contention * min(plain_s, self._draft_backlog_s())
        self._later(self._pass_s + self.machine.sequence_s * len(self._in_pass), self._end_pass)

    def _end_round(self, request: ModelledRequest, tree: TokenTree, waited_s: float) -> None:
        if request.num_rounds == 0:
            self.first_token_s.append(self.now_s - self._begun_s[request])
        super()._end_round(request, tree, waited_s)


def planned(seed: int) -> ReadingDeployment:
    return ReadingDeployment(lambda clock: AdaptivePlanner(MAX_NODES, LINGER_US, clock=clock), "auto", seed)


def plain(seed: int) -> ReadingDeployment:
    return ReadingDeployment(lambda clock: FixedPlanner(0, LINGER_US), "off", seed)


def step(deployment: ReadingDeployment) -> tuple[list[float], list[float], list[float]]:
    """Tokens per second in bins of the 64 and of the one behind it, and times to the first token of the 64."""
    deployment.set_load(1)
    deployment.run(4.0)
    deployment.first_token_s.clear()
    deployment.set_load(64)
    many = [deployment.run(BIN_S) for _ in range(32)]
    first_tokens = list(deployment.first_token_s)
    deployment.set_load(1)
    one = [deployment.run(BIN_S) for _ in range(32)]
    return many, one, first_tokens


def over_a_second(bins: Sequence[float]) -> list[float]:
    """Running means."""
    return [statistics.mean(bins[at : at + 4]) for at in range(len(bins) - 3)]


@pytest.mark.parametrize("seed", range(3))
def test_a_step_with_prompts_to_read_settles_as_soon_as_they_are_read_and_never_collapses(seed: int) -> None:
    many, one, first_tokens = step(planned(seed))
    off_many, off_one, off_first_tokens = step(plain(seed))
    assert len(first_tokens) == len(off_first_tokens) == 63
    assert statistics.median(first_tokens) <= 1.15 * statistics.median(off_first_tokens)
    # While prompts are read.
    num_bins = math.ceil(max(first_tokens) / BIN_S)
    assert min(over_a_second(many[:num_bins])) >= min(over_a_second(off_many[:num_bins]))
    assert statistics.mean(many[:num_bins]) >= 0.95 * statistics.mean(off_many[:num_bins])
    # From then on.
    means = over_a_second(many[num_bins + 1 :])
    assert max(abs(mean / statistics.median(means) - 1) for mean in means) <= 0.15
    assert statistics.median(means) >= 0.9 * statistics.median(off_many[num_bins + 1 :])
    # And back.
    assert statistics.mean(one[:8]) >= 0.7 * statistics.mean(one[8:])
    assert min(over_a_second(one)) >= 1.5 * statistics.median(off_one)


def crowd(num_unread: int) -> tuple[AdaptivePlanner, list[int]]:
    """A planner whose requests begin all at once, and the nodes that their first rounds ask for."""
    planner = AdaptivePlanner(MAX_NODES, LINGER_US, clock=itertools.repeat(1.0).__next__)
    situation = Situation(has_drafter=True, row_multiple=ROW_MULTIPLE)
    return planner, [planner.follow(is_greedy=True).plan(situation).max_nodes for _ in range(num_unread)]


@pytest.mark.parametrize("num_unread", [1, 4, 60])
def test_of_many_that_begin_at_once_the_first_few_ask_for_drafts(num_unread: int) -> None:
    planner, nodes = crowd(num_unread)
    assert [count > 0 for count in nodes] == [at < FEW_PROMPTS for at in range(num_unread)]
    assert planner.num_newcomers == min(num_unread, FEW_PROMPTS)


@pytest.mark.parametrize("num_queued", [0, FEW_PROMPTS, FEW_PROMPTS + 1])
def test_a_queue_of_others_keeps_from_drafting_too(num_queued: int) -> None:
    planner = AdaptivePlanner(MAX_NODES, LINGER_US, clock=itertools.repeat(1.0).__next__)
    situation = Situation(has_drafter=True, load=Load(batch_size=9, queued_sequences=num_queued))
    assert (planner.follow(is_greedy=True).plan(situation).max_nodes > 0) == (num_queued <= FEW_PROMPTS)


def test_sequences_that_wait_for_room_keep_nobody_from_drafting_for_long() -> None:
    now_s = 0.0
    reading = Reading(lambda: now_s)

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
