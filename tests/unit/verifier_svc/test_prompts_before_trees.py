"""How long requests wait for their first token while others speculate, by counting passes and rows."""

from __future__ import annotations

from functools import cache
from statistics import mean, median

import pytest

from coppice.core.tree import chain
from tests.unit.verifier_svc.closed_loop import CHEAP_ROWS, CPU, LATE_DRAFTS, ClosedLoop, Costs, Counts
from tests.unit.verifier_svc.engine.test_pass_shares import sampled
from tests.unit.verifier_svc.engine.test_scheduler import MAX_NODES, Bench
from verifier_svc.engine import pass_shares
from verifier_svc.engine.sequence import Draft


def count(concurrency: int, num_nodes: int, costs: Costs = CPU) -> Counts:
    return ClosedLoop(concurrency, num_nodes, costs).run(num_requests=2 * concurrency + 20, warm_up=concurrency + 10)


@cache
def off(concurrency: int, costs: Costs = CPU) -> Counts:
    return count(concurrency, 0, costs)


@pytest.mark.parametrize(
    ("num_nodes", "costs"), [(4, CPU), (15, CPU), (15, LATE_DRAFTS)], ids=["few nodes", "many", "late drafts"]
)
def test_among_many_first_tokens_come_almost_as_soon_as_without_drafts(num_nodes: int, costs: Costs) -> None:
    plain, drafted = off(64, costs), count(64, num_nodes, costs)
    assert mean(drafted.first_passes) <= 1.3 * mean(plain.first_passes)
    assert median(drafted.first_s) <= 1.4 * median(plain.first_s)
    assert drafted.rows_per_token <= 1.1 * plain.rows_per_token
    assert drafted.tokens_per_s >= 0.98 * plain.tokens_per_s
    assert drafted.rows["nodes"] > 0


@pytest.mark.parametrize(("concurrency", "gain"), [(4, 1.6), (16, 1.1)])
def test_among_few_trees_still_pay(concurrency: int, gain: float) -> None:
    plain, drafted = off(concurrency), count(concurrency, 15)
    assert drafted.tokens_per_s >= gain * plain.tokens_per_s
    assert median(drafted.first_s) <= 1.6 * median(plain.first_s)


@pytest.mark.parametrize("costs", [CPU, CHEAP_ROWS], ids=["dear rows", "cheap rows"])
def test_trees_that_take_all_they_want_commit_no_more_tokens(costs: Costs, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = count(64, 15, costs)
    monkeypatch.setattr(pass_shares, "SHARED_ROWS", 1 << 30)
    greedy = count(64, 15, costs)
    assert shared.tokens_per_s >= greedy.tokens_per_s
    assert median(shared.first_s) <= 0.4 * median(greedy.first_s)


def test_every_round_commits_a_token_in_every_pass_whatever_prompts_come() -> None:
    bench = Bench(num_blocks=500, prefill_chunk=64, max_sequences=400)
    rounds = [bench.add(name, [name], 200) for name in range(10)]
    bench.turn()
    for turn in range(50):
        for name in range(3):
            bench.add(10 + 3 * turn + name, [1] * 60, 1)
        lengths = [len(sequence.tokens) for sequence in rounds]
        bench.turn()
        assert [len(sequence.tokens) for sequence in rounds] == [length + 1 for length in lengths]
        # Prompts come faster than they can be computed, and fill their chunk beside ten rounds.
        assert sum(share.num_pending for share in bench.last_batch) == 10 + 64


def test_a_prompt_does_not_wait_for_the_drafts_of_others() -> None:
    bench = Bench(num_blocks=20)
    waiting = [bench.add(name, [name], 50, linger_s=30.0) for name in range(3)]
    bench.turn()
    assert bench.scheduler.next_start_s() == bench.now_s + 30.0
    bench.add(3, [3] * 20, 50)
    bench.admit()
    assert bench.scheduler.next_start_s() == bench.now_s
    waiting[1].submit(Draft(2, chain([0, 0])))
    assert set(bench.turn()) == {1, 3}


def test_sampled_trees_that_find_no_room_take_turns() -> None:
    bench = Bench(num_blocks=50)
    sequences = [bench.add(name, [name], 200, traverses=True) for name in range(6)]
    bench.turn()
    served = dict.fromkeys(range(6), 0)
    for _ in range(30):
        for sequence in sequences:
            sequence.submit(Draft(len(sequence.tokens), sampled(MAX_NODES)))
        for name, outcome in bench.turn().items():
            assert outcome.draft_nodes in (0, MAX_NODES)
            served[name] += outcome.draft_nodes > 0
    # Four trees of sixteen nodes have room in a pass.
    assert set(served.values()) == {20}
