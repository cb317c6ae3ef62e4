"""A short form of `make faults`: a real orchestrator on back ends without a model, behind proxies that misbehave."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from coppice.client import Client, Options
from tests.faults import run as fault_runs
from tests.faults import workload
from tests.faults.deployment import Deployment, deployed_here
from tests.faults.kinds import HINTS, HOPS, KINDS
from tests.faults.run import Plan, fault_run, schedule
from tests.faults.workload import Case, Load
from tests.toy_target import babble, plain

SHORT = Plan(num_faults=40, mean_gap_s=0.02, max_duration_s=0.1, num_cases=6, num_clients=6, seed=4)


async def test_faults_between_all_services_change_no_token_and_leave_nothing_behind() -> None:
    async with deployed_here(seed=4) as deployment:
        report = await fault_run(deployment, SHORT)
    assert not report.violations
    assert report.faults.total() >= SHORT.num_faults
    assert len(report.faults) >= 8
    assert report.requests["completed"] > 5
    assert report.http_requests > 5
    assert (report.wrong, report.hung, report.crashed) == (0, 0, 0)


async def test_what_is_taken_for_right_is_the_targets_own_word() -> None:
    async with deployed_here(seed=0) as deployment:
        cases = await workload.draw_cases(deployment.address, 3, random.Random(0))
    assert len({case.tokens for case in cases}) == 3
    for case in cases:
        assert case.options.seed is not None
        assert case.options.max_tokens is not None
        assert list(case.tokens) == plain(babble, case.prompt, case.options.max_tokens, case.options.seed)


@pytest.mark.parametrize("fault", ["wrong", "hung"])
async def test_the_run_finds_out_a_deployment_that_is(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "DEADLINE_S", 5.0)
    monkeypatch.setattr(workload, "SLACK_S", -4.999 if fault == "hung" else 5.0)
    async with deployed_here(seed=0) as deployment, Client(deployment.address) as client:
        tokens = plain(babble, (98,), 120, 3)
        expected = tuple(tokens) if fault == "hung" else (*tokens[:-1], 0)
        load = Load(deployment.address, (), 1, 0)
        options = Options(seed=3, max_tokens=120)
        await load.request(client, Case((98,), options, expected), random.Random(2))
    assert load.ends.counts == Counter({fault: 1})
    assert len(load.ends.violations) == 1


async def test_what_is_left_behind_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_runs, "RECOVERY_S", 5.0)
    async with deployed_here(seed=0) as deployment:
        leaking = Deployment(deployment.proxies, lambda: Counter({"blocks of a verifier": 3}))
        report = await fault_run(leaking, Plan(num_faults=1, num_cases=1, num_clients=1))
    assert any("3 blocks of a verifier" in violation for violation in report.violations)


def test_a_seed_gives_the_same_faults_again_and_all_kinds_come_up() -> None:
    nothing = dict.fromkeys((*HOPS, "orchestrator"))
    deployment = Deployment(nothing, lambda: Counter(), nothing)  # type: ignore[arg-type]
    drawn = [[draw() for _ in range(2500)] for draw in (schedule(SHORT, deployment), schedule(SHORT, deployment))]
    times, faults = ([[one[part] for one in draws] for draws in drawn] for part in (0, 1))
    assert times[0] == times[1]
    assert [(one.kind, one.target, one.duration_s) for one in faults[0]] == [
        (one.kind, one.target, one.duration_s) for one in faults[1]
    ]
    assert {one.kind for one in faults[0]} == KINDS.keys()
    assert all(one.target in HINTS for one in faults[0] if one.kind == "flip")
