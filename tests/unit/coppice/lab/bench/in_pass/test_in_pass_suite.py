"""The whole suite on a tiny model, a server that behaves like ours, and a verifier that only counts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client.metrics_core import Metric
from typer.testing import CliRunner

from coppice.cli import bench
from coppice.lab.bench.harness.experiment import BenchmarkError
from coppice.lab.bench.in_pass import suite as in_pass_suite
from coppice.lab.bench.in_pass.suite import (
    MASKS,
    NODES,
    PASS_S,
    PASSES,
    PRUNED_NODES,
    PRUNED_PASSES,
    ROW_PASSES,
    ROWS,
    InPassSuite,
    Services,
    front_of,
    variants_of,
)
from coppice.lab.bench.in_pass.variants import Group, InPass, make_groups
from coppice.lab.bench.latency import Plan
from coppice.lab.bench.prompts import Prompt
from coppice.lab.bench.services import Metered
from coppice.obs import metrics_server
from coppice.obs.metrics import Prefix
from tests.integration.test_orchestrator_metrics import free_port
from tests.unit.coppice.lab.bench.in_pass.made_up import SMALL_LM
from tests.unit.coppice.lab.bench.schema import lost_fields
from tests.unit.coppice.lab.bench.test_bench_command import serve_at
from verifier_svc.extras.redraft.space_adapter import SpaceAdapter, save_adapter

TEMPERATURES = (0.0, 1.0)
WHAT = InPass(SMALL_LM, "/a", 2, "/h", (1, 2), (1,), (4,), (1, 2))
# By how much each grows between two looks.
GROWTH = {PASSES: 4, PASS_S: 0.02, ROWS: 24, ROW_PASSES: 4, NODES: 20, MASKS: 8, PRUNED_NODES: 5, PRUNED_PASSES: 3}


@pytest.fixture
def metrics_url() -> Iterator[str]:
    """A verifier that has made four more passes each time that it is asked."""
    own = Prefix("coppice_verifier_")
    num_reads = 0

    def read() -> Iterator[Metric]:
        nonlocal num_reads
        num_reads += 1
        for name, growth in GROWTH.items():
            short = name.removeprefix("coppice_verifier_")
            metric = own.counter if short.endswith("_total") else own.gauge
            yield metric(short.removesuffix("_total"), "Made up.", growth * num_reads)
        for name, (whole, pruned) in {"rows": (12.0, 12.0), "seconds": (0.01, 0.008)}.items():
            values = {"no": whole * num_reads, "yes": pruned * num_reads}
            yield own.counters(f"prunable_pass_{name}", "Made up.", "pruned", values)

    port = free_port()
    with metrics_server.serving_metrics(read, "127.0.0.1:0", port):
        yield f"http://127.0.0.1:{port}/metrics"


def make_suite(target: Path, what: InPass = WHAT) -> InPassSuite:
    prompts = (Prompt("def f(x):", "a"), Prompt("import os" * 20, "b"))
    plan = Plan(2, 8, TEMPERATURES, seed=3)
    return InPassSuite(target, what, make_groups(what), prompts, 2, plan, 1, ("Nobody measured this.",))


def served(groups: tuple[Group, ...], address: str, url: str, plain: str = "") -> Services:
    variants = variants_of(groups)
    fronts = {front_of(variant): address for variant in variants}
    fronts[front_of(groups[0].variants[0])] = plain or address
    return Services(fronts, {variant.verifier: Metered(address, url) for variant in variants})


def test_the_report_has_every_variant_ratio_and_circumstance(tiny_target: Path, server: str, metrics_url: str) -> None:
    suite = make_suite(tiny_target)
    report = suite.run(served(suite.groups, server, metrics_url))
    assert json.loads(json.dumps(report)) == report
    names = [row["name"] for row in report["rows"]]
    # Plain decoding, the adapter as it serves, two shapes, merged, the drafter; plain decoding and, for
    # both sources, four switches.
    assert len(set(names)) == len(names) == 2 * (6 + 2 * 9)
    assert {"space/off", "space/off@T1", "space.best/off", "space.tau", "space+small-lm/small-lm"} <= set(
        report["ratios"]
    )
    assert report["ratios"]["rows-saved"] == report["ratios"]["rows-saved@T1"] == 0.25
    assert report["ratios"]["tau-kept"] == report["ratios"]["pruning.auto-gain.b1"] == 1.0
    assert report["ratios"]["pruning.time-gain.b1"] == 1.25
    assert report["ratios"]["space.tau"] == 2.0
    row = {row["name"]: row for row in report["rows"]}["pruning b=1: coppice-on redraft n=4 pruning on T=1"]
    assert (row["rows_per_pass"], row["rows_left_per_pass"], row["ms_per_pass"]) == (6.0, 4.75, 5.0)
    assert (row["num_requests"], row["num_identical"], row["passes"]) == (4, 4, 16)
    assert {"machine", "versions", "command", "commit", "settings"} <= set(report)
    assert report["mismatches"] == []
    assert lost_fields(report, "in-pass.json") == set()
    assert "Nobody measured this." in report["notes"]
    assert sum("space.best/off is that of space" in note for note in report["notes"]) == 2


def test_a_verifier_without_metrics_ends_the_benchmark(tiny_target: Path, server: str) -> None:
    suite = make_suite(tiny_target)
    with pytest.raises(BenchmarkError, match="no metrics of a verifier"):
        suite.run(served(suite.groups, server, f"http://127.0.0.1:{free_port()}/metrics"))


def invoke(
    monkeypatch: pytest.MonkeyPatch, target: Path, directory: Path, running: Any, *options: str
) -> tuple[int, str]:
    async def start(topology: object, groups: tuple[Group, ...]) -> Services:
        services: Services = running(groups)
        return services

    monkeypatch.setattr(in_pass_suite, "start_services", start)
    serve_at(monkeypatch, "nowhere")
    monkeypatch.setattr("coppice.cli.bench.in_pass.MODELS", directory / "models")
    prompts = directory / "prompts.jsonl"
    prompts.write_text('{"prompt": "def f(x):"}\n')
    arguments = [
        *("ablation", "--suite", "in-pass", "--quick", "--prompts", str(prompts), "--target", str(target)),
        *("--drafter", f"small-lm={target}", "--max-tokens", "4", "--threads", "1", "--temperature", "0"),
        *("--out", str(directory / "out"), *options),
    ]
    result = CliRunner().invoke(bench.app, arguments)
    return result.exit_code, result.output


@pytest.fixture
def adapter(tmp_path: Path) -> str:
    """An adapter of two masks, in the place of the bundled one."""
    directory = tmp_path / "models" / "space"
    save_adapter(SpaceAdapter(torch.zeros(2, 8), {}, ((0.0, (1.0, 1.0)),)), directory)
    return str(directory)


@pytest.fixture
def head(tmp_path: Path) -> str:
    """A head in the place of the bundled one."""
    directory = tmp_path / "models" / "early-head"
    directory.mkdir(parents=True)
    (directory / "early_head.json").write_text("{}")
    return str(directory)


@pytest.mark.usefixtures("adapter", "head")
def test_the_command_takes_the_bundled_adapter_and_says_what_it_left_out(
    tiny_target: Path, server: str, metrics_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bundled head is the bundled target's, and this one is another."""
    code, output = invoke(monkeypatch, tiny_target, tmp_path, lambda groups: served(groups, server, metrics_url))
    assert code == 0, output
    report = json.loads((tmp_path / "out" / "in-pass.json").read_text())
    assert report["suite"] == "in-pass"
    assert report["settings"]["masks_and_groups"] == [[2, 1]]
    assert {row["group"] for row in report["rows"]} == {"drafting"}
    assert any("Early pruning is left out" in note for note in report["notes"])
    assert (tmp_path / "out" / "in-pass.png").is_file()
    assert "space k=2 g=1" in output


def test_a_changed_token_is_exit_code_1(
    tiny_target: Path,
    server: str,
    corrupting_server: str,
    metrics_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    adapter: str,
) -> None:
    code, output = invoke(
        monkeypatch, tiny_target, tmp_path, lambda groups: served(groups, corrupting_server, metrics_url, plain=server)
    )
    assert code == 1
    assert "MISMATCH: coppice-on space k=2 g=1 differs from coppice-off" in output
    assert (tmp_path / "out" / "in-pass.json").is_file()


def test_options_of_in_pass_mean_nothing_to_drafters(tiny_target: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(bench.app, ["ablation", "--target", str(tiny_target), "--batches", "4"])
    assert result.exit_code == 2
    assert "--batches" in result.output
