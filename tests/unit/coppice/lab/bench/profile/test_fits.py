"""Costs found again in records that were made of them."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from coppice.lab.bench.profile.fits import (
    Calibration,
    CpuRecord,
    DraftRecord,
    Floats,
    OpeningRecord,
    PassRecord,
    Records,
    RoundRecord,
    Timeline,
    TreeRecord,
    fit_drafts,
    fit_messages,
    fit_passes,
    nonnegative,
    work_of,
)
from coppice.lab.simulator.machine import Curve, VerifierCosts

COSTS = VerifierCosts(
    Curve((4, 16, 64, 256, 512), (0.005, 0.008, 0.015, 0.05, 0.1)),
    context=0,
    row_context_s=3e-8,
    sequence_s=0.00004,
    round_row_s=0.00006,
    gap_s=0.0004,
    gap_sequence_s=0.0001,
    gap_token_s=0.00002,
    start_s=0.0003,
    start_sequence_s=0.00001,
    row_multiple=4,
)
PASS_PER_DRAFT = 0.2


def made_passes(batch: int, nodes: int, count: int, *, drafts: bool) -> Records:
    """Passes one behind another, some with a part of a prompt; with drafts, one beside half of every second pass."""
    generator = random.Random(f"{batch} {nodes}")
    passes, drafted, now_s = list[PassRecord](), list[DraftRecord](), 1.0
    length = 100
    for number in range(count):
        prompt = generator.choice([0, 0, 40, 200])
        kept = [generator.randint(0, nodes) for _ in range(batch)]
        rounds = tuple(RoundRecord(str(index), length, 1 + kept[index] // 2, kept[index]) for index in range(batch))
        rows = batch + sum(kept) + prompt
        started_s = now_s + COSTS.before_s(batch)
        pass_s = COSTS.pass_s(work_of(PassRecord(0.0, 0.0, 0.0, rows, rounds)))
        if drafts and number % 2:
            busy_s = pass_s / 2
            drafted.append(DraftRecord("0", length, 2, started_s, started_s, started_s + busy_s, 4))
            pass_s += PASS_PER_DRAFT * busy_s
        ended_s = started_s + pass_s
        now_s = ended_s + COSTS.after_s(batch, sum(one.num_committed for one in rounds))
        passes.append(PassRecord(started_s, ended_s, now_s, rows, rounds))
        length += generator.randint(1, 5)
    return Records(tuple(passes), (), (), tuple(drafted), ())


def test_costs_of_passes_are_found_again() -> None:
    shapes = [(False, 1, 0), (False, 8, 0), (False, 64, 0), (True, 1, 7), (True, 8, 7), (True, 64, 3)]
    loads = [
        Calibration(speculates, batch, made_passes(batch, nodes, 120, drafts=speculates))
        for speculates, batch, nodes in shapes
    ]
    found = fit_passes(loads, row_multiple=4, max_nodes=15)
    # Single coefficients may stand for each other: what counts is a pass, that of a load that was not seen too.
    for one in made_passes(16, 15, 50, drafts=False).passes:
        assert found.costs.pass_s(work_of(one)) == pytest.approx(one.pass_s, rel=0.01)
    for number, tokens in ((1, 1), (8, 20), (64, 64)):
        assert found.costs.after_s(number, tokens) == pytest.approx(COSTS.after_s(number, tokens), rel=1e-3)
        assert found.costs.before_s(number) == pytest.approx(COSTS.before_s(number), rel=1e-3)
    assert found.pass_per_draft == pytest.approx(PASS_PER_DRAFT, rel=0.02)
    assert found.noise < 0.01


def test_drafts_cost_what_they_take_alone_and_lose_to_passes_what_they_take_longer() -> None:
    passes, drafts, now_s = list[PassRecord](), list[DraftRecord](), 0.0
    for number in range(60):
        nodes = (2, 4, 8)[number % 3]
        work_s = 0.001 + 0.0005 * nodes
        # Every second draft begins with a pass of 4 ms, in which it gets on at a quarter of its speed.
        pass_s = 0.004 * (number % 2)
        if pass_s:
            passes.append(PassRecord(now_s, now_s + pass_s, now_s + pass_s, 4, ()))
        ended_s = now_s + work_s + 0.75 * pass_s
        drafts.append(DraftRecord(str(number), 50, 3, now_s, now_s, ended_s, nodes))
        now_s = ended_s + 0.01
    drafts.append(DraftRecord("new", 101, 101, now_s, now_s, now_s + 0.002 + 100 * 0.00005, 2))
    fit = fit_drafts([Calibration(True, 1, Records(tuple(passes), (), (), tuple(drafts), ()))])
    for nodes in (2, 4, 8):
        assert fit.costs.draft_s(nodes, 1) == pytest.approx(0.001 + 0.0005 * nodes)
    assert fit.costs.read_token_s == pytest.approx(0.00005)
    assert fit.draft_factor == pytest.approx(4.0)


MESSAGE_S, OUTCOME_S, ASK_S, TURNAROUND_S, AFTER_S = 0.0004, 0.0006, 0.0002, 0.003, 0.0002
# By the clock the orchestrator takes so many times as long.
FACTOR = 1.5


def made_messages(batch: int, *, speculates: bool, slow_to_begin_s: float = 0.0) -> Calibration:
    """Passes of so many rounds each, whose outcomes the orchestrator takes one after another."""
    passes, drafts, trees, openings = [], [], [], [OpeningRecord("0 0", 0.0)]
    now_s = 0.001
    for number in range(40):
        # Where there is one request at a time, each has four rounds.
        names = [f"{number // 4} {index}" if batch == 1 else str(index) for index in range(batch)]
        ended_s, delivered_s = now_s + 0.01, now_s + 0.01 + AFTER_S
        rounds = tuple(RoundRecord(name, 10 * number, 3, 4) for name in names)
        passes.append(PassRecord(now_s, ended_s, delivered_s, 20, rounds))
        is_last = batch == 1 and number % 4 == 3
        for place, one in enumerate(() if is_last or not speculates else rounds):
            asked_s = delivered_s + 2 * MESSAGE_S + (1 + place) * FACTOR * (OUTCOME_S + ASK_S) + slow_to_begin_s
            drafts.append(DraftRecord(one.request_id, one.length, 3, asked_s, asked_s, asked_s + 0.05, 4))
            trees.append(TreeRecord(one.request_id, one.length, asked_s + 0.05 + 2 * MESSAGE_S + FACTOR * ASK_S))
        if is_last:
            opened_s = delivered_s + MESSAGE_S + FACTOR * OUTCOME_S + TURNAROUND_S
            openings.append(OpeningRecord(f"{number // 4 + 1} 0", opened_s))
        now_s = delivered_s + 0.2
    # One request at a time wakes the process for each message.
    work_s = (9 if batch == 1 else 1) * (batch * len(passes) * OUTCOME_S + len(trees) * 2 * ASK_S)
    # An hour of CPU time before.
    cpu = CpuRecord(0.0, 3600.0), CpuRecord(now_s, 3600.0 + work_s)
    return Calibration(speculates, batch, Records(tuple(passes), tuple(openings), tuple(trees), tuple(drafts), cpu))


def test_messages_are_found_again() -> None:
    loads = [made_messages(batch, speculates=speculates) for batch, speculates in ((1, True), (5, True), (5, False))]
    fit = fit_messages(loads, AFTER_S)
    assert fit.message_s == pytest.approx(MESSAGE_S, rel=1e-4)
    assert fit.orchestrator.outcome_s == pytest.approx(OUTCOME_S, rel=1e-4)
    assert fit.orchestrator.ask_s == pytest.approx(ASK_S, rel=1e-3)
    assert fit.orchestrator.tree_s == pytest.approx(ASK_S, rel=1e-3)
    assert fit.orchestrator.turnaround_s == pytest.approx(TURNAROUND_S, rel=1e-3)
    assert fit.orchestrator_factor == pytest.approx(FACTOR, rel=1e-3)


@pytest.mark.parametrize("seed", range(12))
def test_coefficients_are_the_best_of_all_that_are_not_negative(seed: int) -> None:
    generator = np.random.default_rng(seed)
    features, values = generator.normal(size=(20, 4)), generator.normal(size=20)

    def error(coefficients: Floats) -> float:
        return float(np.linalg.norm(features @ coefficients - values))

    # Every choice of coefficients that may be above 0, by plain least squares.
    best = error(np.zeros(4))
    for size in range(1, 5):
        for chosen in map(list, itertools.combinations(range(4), size)):
            part = np.linalg.lstsq(features[:, chosen], values, rcond=None)[0]
            if (part >= 0).all():
                whole = np.zeros(4)
                whole[chosen] = part
                best = min(best, error(whole))
    found = nonnegative(features, values)
    assert (found >= 0).all()
    assert error(found) == pytest.approx(best, rel=1e-6)


def test_a_timeline_adds_up_what_lies_between_two_times() -> None:
    generator = random.Random(3)
    cuts = sorted(generator.uniform(0, 10) for _ in range(40))
    stretches = list(zip(cuts[::2], cuts[1::2], strict=True))
    timeline = Timeline(reversed(stretches))
    for _ in range(50):
        low, high = sorted((generator.uniform(-1, 11), generator.uniform(-1, 11)))
        slow = sum(max(0.0, min(high, end) - max(low, start)) for start, end in stretches)
        assert timeline.within(low, high) == pytest.approx(slow)
    assert Timeline([]).within(0.0, 5.0) == 0.0
