"""The whole suite on a tiny model, a server that behaves like ours, and drafters that only count."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.metrics_core import Metric
from typer.testing import CliRunner

from coppice.cli import bench
from coppice.lab.bench.ablation import suite as ablation_suite
from coppice.lab.bench.ablation.suite import AblationSuite, Services
from coppice.lab.bench.ablation.variants import Grids, Group, make_groups
from coppice.lab.bench.harness.experiment import BenchmarkError
from coppice.lab.bench.harness.report import write_json
from coppice.lab.bench.latency import Plan
from coppice.lab.bench.prompts import Prompt
from coppice.lab.bench.services import Metered
from coppice.obs import metrics_server
from coppice.obs.metrics import Prefix
from tests.integration.test_orchestrator_metrics import free_port
from tests.unit.coppice.lab.bench.ablation.made_up import SMALL_LM
from tests.unit.coppice.lab.bench.schema import lost_fields
from tests.unit.coppice.lab.bench.test_bench_command import serve_at

TEMPERATURES = (0.0, 1.0)


@pytest.fixture
def metrics_url() -> Iterator[str]:
    """A drafter that has observed ten more nodes each time that it is asked, four of them accepted."""
    own = Prefix("coppice_drafter_")
    num_reads = 0

    def read() -> Iterator[Metric]:
        nonlocal num_reads
        num_reads += 1
        for name, value in (("observed_nodes", 10), ("expected_acceptance", 5), ("accepted_nodes", 4)):
            yield own.counter(name, "Made up.", value * num_reads, temperature="0", probability="0.5")

    port = free_port()
    with metrics_server.serving_metrics(read, "127.0.0.1:0", port):
        yield f"http://127.0.0.1:{port}/metrics"


def make_suite(target: Path) -> AblationSuite:
    prompts = (Prompt("def f(x):", "a"), Prompt("import os" * 20, "b"))
    groups = make_groups([SMALL_LM], TEMPERATURES, 4, Grids())
    return AblationSuite(
        target, (SMALL_LM,), groups, prompts, Plan(2, 8, TEMPERATURES, seed=3), 4, "asynchronous", threads=1
    )


def served(groups: tuple[Group, ...], address: str, url: str, plain: str = "") -> Services:
    variants = [variant for group in groups for variant in group.variants]
    drafters = {drafter: Metered(address, url) for variant in variants for drafter in variant.drafters}
    fronts = {(variant.drafters, variant.has_cache): address for variant in variants}
    return Services(plain or address, fronts, drafters)


def test_the_report_has_every_variant_ratio_and_circumstance(
    tiny_target: Path, server: str, metrics_url: str, tmp_path: Path
) -> None:
    suite = make_suite(tiny_target)
    report = suite.run(served(suite.groups, server, metrics_url))
    write_json(report, tmp_path / "ablation.json")
    assert json.loads((tmp_path / "ablation.json").read_text()) == report
    names = [row["name"] for row in report["rows"]]
    assert len(set(names)) == len(names) == 2 * (5 + 3 + 3) + 3 + 3
    assert "shape: coppice-on small-lm chain T=1" in names
    ratios = report["ratios"]
    assert {"small-lm.tau", "cache.tau@T1", "merged/best-single", "tree/chain", "calibration-error"} <= set(ratios)
    assert ratios["small-lm.tau"] == 2.0
    # Ten nodes of each completion, of which five were expected and four accepted; the cache alone has none.
    assert ratios["calibration-error"] == ratios["calibration-error-off"] == 0.1
    observed = {row["name"]: row["observed_nodes"] for row in report["rows"]}
    assert observed["sources: coppice-on small-lm T=0"] == 10 * 2 * 2
    assert observed["sources: coppice-on cache T=0"] == observed["sources: coppice-off T=0"] == 0
    notes = {row["name"]: row["note"] for row in report["rows"]}
    assert notes["sources: coppice-on small-lm T=0"].startswith("coppice, MODE_FORCED")
    assert "sources small-lm" in notes["sources: coppice-on small-lm T=0"]
    # Requests that leave everything to the orchestrator name nobody.
    assert notes["sources: coppice-on planner T=0"] == "coppice, MODE_AUTO, node budget: the server's own"
    assert {"machine", "versions", "command", "commit", "settings"} <= set(report)
    assert report["mismatches"] == []
    assert lost_fields(report, "ablation.json") == set()
    assert not any("ms_per_pass_by_rows" in row for row in report["rows"])
    assert any("calibration-error is 0.100" in note for note in report["notes"])


def test_a_drafter_without_metrics_ends_the_benchmark(tiny_target: Path, server: str) -> None:
    suite = make_suite(tiny_target)
    with pytest.raises(BenchmarkError, match="no metrics of a drafter"):
        suite.run(served(suite.groups, server, f"http://127.0.0.1:{free_port()}/metrics"))


def invoke(
    monkeypatch: pytest.MonkeyPatch,
    target: Path,
    directory: Path,
    running: Any,
    *options: str,
    orchestrators: list[dict[str, str]] | None = None,
) -> tuple[int, str]:
    """`orchestrators` gets the environment that they would be started with."""

    async def start(topology: object, groups: tuple[Group, ...], env: dict[str, str]) -> Services:
        if orchestrators is not None:
            orchestrators.append(env)
        services: Services = running(groups)
        return services

    monkeypatch.setattr(ablation_suite, "start_services", start)
    serve_at(monkeypatch, "nowhere")
    prompts = directory / "prompts.jsonl"
    prompts.write_text('{"prompt": "def f(x):"}\n')
    arguments = [
        *("ablation", "--quick", "--prompts", str(prompts), "--target", str(target), "--threads", "1"),
        *("--drafter", f"small-lm={target}", "--max-tokens", "4", "--out", str(directory / "out"), *options),
    ]
    result = CliRunner().invoke(bench.app, arguments)
    return result.exit_code, result.output


def test_the_command_writes_json_and_plot_and_prints_a_table(
    tiny_target: Path, server: str, metrics_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orchestrators: list[dict[str, str]] = []
    code, output = invoke(
        monkeypatch,
        tiny_target,
        tmp_path,
        lambda groups: served(groups, server, metrics_url),
        *("--temperature", "0", "--nodes", "31", "--rounds", "synchronous"),
        orchestrators=orchestrators,
    )
    assert code == 0, output
    assert orchestrators == [{"ROUNDS": "synchronous", "MAX_NODES": "31"}]
    report = json.loads((tmp_path / "out" / "ablation.json").read_text())
    assert (report["settings"]["max_tokens"], report["settings"]["num_runs"]) == (4, 1)
    assert (report["settings"]["num_nodes"], report["settings"]["rounds"]) == (31, "synchronous")
    # Rounds that wait for all have no planner.
    assert not any("planner" in row["name"] for row in report["rows"])
    assert (tmp_path / "out" / "ablation.png").is_file()
    assert "small-lm+cache" in output


def test_a_changed_token_is_exit_code_1(
    tiny_target: Path,
    server: str,
    corrupting_server: str,
    metrics_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code, output = invoke(
        monkeypatch,
        tiny_target,
        tmp_path,
        lambda groups: served(groups, corrupting_server, metrics_url, plain=server),
        *("--temperature", "0"),
    )
    assert code == 1
    assert "MISMATCH: coppice-on small-lm differs from coppice-off" in output
    assert (tmp_path / "out" / "ablation.json").is_file()
