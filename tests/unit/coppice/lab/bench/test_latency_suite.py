"""The whole suite on a tiny model and a server that behaves like ours."""

from __future__ import annotations

import json
from pathlib import Path

import grpc
import pytest

from coppice.lab.bench.contenders import CoppiceContender, Mode, Task
from coppice.lab.bench.harness.experiment import BenchmarkError
from coppice.lab.bench.harness.report import write_json
from coppice.lab.bench.latency import LatencySuite, Plan
from coppice.lab.bench.prompts import Prompt
from coppice.lab.bench.throughput import CoppiceBatch
from tests.unit.coppice.lab.bench.schema import lost_fields


def _suite(target: Path, *, sweep_nodes: tuple[int, ...] = ()) -> LatencySuite:
    prompts = (Prompt("def f(x):", "a"), Prompt("import os" * 20, "b"))
    plan = Plan(2, 8, (0.0, 1.0), seed=3)
    return LatencySuite(target, target, prompts, plan, threads=1, sweep_nodes=sweep_nodes)


def test_the_report_has_every_contender_ratio_and_circumstance(tiny_target: Path, server: str, tmp_path: Path) -> None:
    report = _suite(tiny_target, sweep_nodes=(4,)).run(server)
    write_json(report, tmp_path / "out" / "latency.json")
    assert json.loads((tmp_path / "out" / "latency.json").read_text()) == report
    names = ["transformers", "transformers-assisted", "coppice-off", "coppice-on", "coppice-on nodes=4"]
    assert [row["name"] for row in report["rows"]] == [f"{name} T={t}" for t in (0, 1) for name in names]
    wanted = {"on/off", "on/transformers", "on/assisted", "off/transformers", "forward-share"}
    assert wanted | {f"{name}@T1" for name in wanted} <= set(report["ratios"])
    assert {"machine", "versions", "command", "commit", "settings"} <= set(report)
    assert report["settings"]["num_cut_prompts"] == 1
    assert report["mismatches"] == report["divergences"] == []
    assert lost_fields(report, "latency.json") == set()


def test_rows_carry_what_the_server_counted(tiny_target: Path, server: str) -> None:
    rows = {row["name"]: row for row in _suite(tiny_target).run(server)["rows"]}
    on = rows["coppice-on T=0"]
    assert on["mean_acceptance_length"] == 2.0
    assert on["acceptance_by_depth"] == [1.0, 0.0, 0.0]
    assert (on["drafted_share"], rows["transformers T=0"]["drafted_share"]) == (1.0, None)
    assert on["ms_per_pass_by_rows"] == {"4": {"count": 16, "mean_ms": 0.25}}
    assert on["origins"] == {"fresh": {"rounds": 16, "accepted": 16}}
    assert (on["bubble_ms"], on["draft_ahead_hits"]) == (0.25, 0.0)
    assert on["sources"] == {"small-lm": {"proposed": 48, "accepted": 16}}
    assert (on["identical"], on["num_identical_to_transformers"]) == (True, 2)
    assert rows["coppice-off T=0"]["mean_acceptance_length"] == 1.0


def test_speculation_that_changes_a_token_is_reported(tiny_target: Path, corrupting_server: str) -> None:
    report = _suite(tiny_target).run(corrupting_server)
    assert "coppice-on differs from coppice-off at T=0 on prompt 1 (run 1)" in report["mismatches"]


def test_a_budget_above_the_servers_limit_is_refused(tiny_target: Path, server: str) -> None:
    with pytest.raises(BenchmarkError, match="21 is above the server's limit of 20"):
        _suite(tiny_target, sweep_nodes=(21,)).run(server)


def test_a_failed_call_says_whose_it_was_and_why(server: str) -> None:
    with grpc.insecure_channel(server) as channel:
        contender = CoppiceContender("coppice-on", channel, Mode.MODE_FORCED)
        with pytest.raises(BenchmarkError, match=r"coppice-on: .*INVALID_ARGUMENT.*too hot"):
            contender.complete(Task((1, 2), 4, 1.9, seed=0))


def test_who_is_made_anew_for_another_group_finds_nothing_that_was_computed_before(
    once_server: str,
) -> None:
    task = Task((1, 2), 4, 0.0, seed=0)
    with grpc.insecure_channel(once_server) as channel:
        for _ in range(2):
            contender = CoppiceContender("coppice-off", channel, Mode.MODE_OFF)
            assert contender.complete(task).token_ids == contender.complete(task).token_ids
    for _ in range(2):
        CoppiceBatch("coppice-off", once_server, "off").complete([task, task])
