"""Both ablations on a tiny model, a server that behaves like ours, and services that only count."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from prometheus_client.metrics_core import Metric
from typer.testing import CliRunner

from coppice.cli import bench
from coppice.cli.topology import DrafterSpec
from coppice.lab.bench.ablation import drafters, in_pass
from coppice.lab.bench.ablation import groups as ablation_groups
from coppice.lab.bench.ablation.drafters import measure_drafters
from coppice.lab.bench.ablation.groups import PLAIN_DECODING, Group, Services, variants_of
from coppice.lab.bench.ablation.in_pass import InPass, measure_in_pass
from coppice.lab.bench.comparison import Plan, Setup
from coppice.lab.bench.harness.experiment import BenchmarkError
from coppice.lab.bench.prompts import Prompt
from coppice.lab.bench.services import Metered
from coppice.obs import metrics_server
from coppice.obs.metrics import Prefix
from tests.integration.test_orchestrator_metrics import free_port
from tests.unit.coppice.lab.bench.schema import lost_fields
from tests.unit.coppice.lab.bench.test_bench_command import serve_at
from verifier_svc.extras.redraft.adapter import SpaceAdapter, save_adapter

SMALL_LM = DrafterSpec("small-lm", "models/small-lm")
WHAT = InPass(SMALL_LM, "/a", 2, "/h", (1, 2), (1,), (4,), (1, 2))
# By how much each grows between two looks.
GROWTH = {
    in_pass.PASSES: 4,
    in_pass.PASS_S: 0.02,
    in_pass.ROWS: 24,
    in_pass.ROW_PASSES: 4,
    in_pass.NODES: 20,
    in_pass.MASKS: 8,
    in_pass.PRUNED_NODES: 5,
    in_pass.PRUNED_PASSES: 3,
}


@pytest.fixture
def metrics_url() -> Iterator[str]:
    """A verifier that has made four more passes each time it is asked, and a drafter that has observed ten nodes."""
    verifier, drafter = Prefix("coppice_verifier_"), Prefix("coppice_drafter_")
    num_reads = 0

    def read() -> Iterator[Metric]:
        nonlocal num_reads
        num_reads += 1
        for name, growth in GROWTH.items():
            short = name.removeprefix("coppice_verifier_")
            metric = verifier.counter if short.endswith("_total") else verifier.gauge
            yield metric(short.removesuffix("_total"), "Made up.", growth * num_reads)
        for name, (whole, pruned) in {"rows": (12.0, 12.0), "seconds": (0.01, 0.008)}.items():
            values = {"no": whole * num_reads, "yes": pruned * num_reads}
            yield verifier.counters(f"prunable_pass_{name}", "Made up.", "pruned", values)
        for name, value in (("observed_nodes", 10), ("expected_acceptance", 5), ("accepted_nodes", 4)):
            yield drafter.counter(name, "Made up.", value * num_reads, temperature="0", probability="0.5")

    port = free_port()
    with metrics_server.serving_metrics(read, "127.0.0.1:0", port):
        yield f"http://127.0.0.1:{port}/metrics"


def served(groups: Sequence[Group], address: str, url: str, plain: str = "") -> Services:
    """All variants at an address, and plain decoding at another one."""
    variants = variants_of(groups)
    fronts = {variant.front: address for variant in variants} | {PLAIN_DECODING.front: plain or address}
    metered = Metered(address, url)
    every = [drafter for variant in variants for drafter in variant.drafters]
    return Services(fronts, {one.verifier: metered for one in variants}, dict.fromkeys(every, metered))


def setup(target: Path) -> Setup:
    prompts = (Prompt("def f(x):", "a"), Prompt("import os" * 20, "b"))
    return Setup(target, prompts, Plan(2, 8, (0.0, 1.0), seed=3), 1)


async def test_the_report_of_drafters_has_every_variant_and_ratio(
    tiny_target: Path, server: str, metrics_url: str
) -> None:
    groups = drafters.make_groups([SMALL_LM], (0.0, 1.0), 4, {})
    given = setup(tiny_target), (SMALL_LM,), groups, 4, "asynchronous"
    report = await measure_drafters(*given, served(groups, server, metrics_url))
    assert json.loads(json.dumps(report)) == report
    rows = {row["name"]: row for row in report["rows"]}
    assert len(rows) == len(report["rows"]) == 2 * (5 + 3 + 3) + 3 + 3
    assert "shape: coppice-on small-lm chain T=1" in rows
    ratios = report["ratios"]
    assert {
        "small-lm.tau",
        "cache.tau@T1",
        "merged.tau@T1",
        "on/off",
        "on/off@T1",
        "merged/best-single",
        "tree/chain",
        "calibration-error",
    } <= set(ratios)
    assert ratios["small-lm.tau"] == 2.0
    # Ten nodes of each completion, of which five were expected and four accepted; the cache alone has none.
    assert ratios["calibration-error"] == ratios["calibration-error-off"] == 0.1
    assert rows["sources: coppice-on small-lm T=0"]["observed_nodes"] == 10 * 2 * 2
    assert rows["sources: coppice-on cache T=0"]["observed_nodes"] == 0
    assert rows["sources: coppice-on small-lm T=0"]["note"].startswith("coppice, MODE_FORCED")
    assert "sources small-lm" in rows["sources: coppice-on small-lm T=0"]["note"]
    # Requests that leave everything to the orchestrator name nobody.
    planner = rows["sources: coppice-on planner T=0"]["note"]
    assert planner == "coppice, MODE_AUTO, node budget: the server's own"
    assert report["mismatches"] == []
    assert lost_fields(report, "ablation.json") == set()
    assert any("calibration-error is 0.100" in note for note in report["notes"])
    with pytest.raises(BenchmarkError, match="no metrics of a drafter"):
        await measure_drafters(*given, served(groups, server, f"http://127.0.0.1:{free_port()}/metrics"))


async def test_the_report_of_the_pass_has_every_variant_and_ratio(
    tiny_target: Path, server: str, metrics_url: str
) -> None:
    groups = in_pass.make_groups(WHAT, (0.0, 1.0))
    given = setup(tiny_target), WHAT, groups, 2, ("Nobody measured this.",)
    report = await measure_in_pass(*given, served(groups, server, metrics_url))
    assert json.loads(json.dumps(report)) == report
    rows = {row["name"]: row for row in report["rows"]}
    # Plain decoding, the adapter as it serves, two shapes, merged, the drafter; plain decoding and, for
    # both sources, four switches.
    assert len(rows) == len(report["rows"]) == 2 * (6 + 2 * 9)
    ratios = report["ratios"]
    assert {"space/off", "space/off@T1", "space.best/off", "space+small-lm/small-lm"} <= set(ratios)
    assert ratios["rows-saved"] == ratios["rows-saved@T1"] == 0.25
    assert ratios["tau-kept"] == ratios["pruning.auto-gain.b1"] == 1.0
    assert (ratios["pruning.time-gain.b1"], ratios["space.tau"]) == (1.25, 2.0)
    row = rows["pruning b=1: coppice-on redraft n=4 pruning on T=1"]
    assert (row["rows_per_pass"], row["rows_left_per_pass"], row["ms_per_pass"]) == (6.0, 4.75, 5.0)
    assert (row["num_requests"], row["num_identical"], row["passes"]) == (4, 4, 16)
    assert report["mismatches"] == []
    assert lost_fields(report, "in-pass.json") == set()
    assert "Nobody measured this." in report["notes"]
    assert sum("space.best/off is that of space" in note for note in report["notes"]) == 2


@pytest.mark.parametrize("corrupts", [False, True])
@pytest.mark.parametrize("suite", ["drafters", "in-pass"])
def test_the_command_writes_json_and_picture_and_prints_a_table(
    suite: str,
    corrupts: bool,
    tiny_target: Path,
    server: str,
    corrupting_server: str,
    metrics_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[Group] = []

    async def start(topology: object, groups: Sequence[Group]) -> Services:
        started.extend(groups)
        return served(groups, corrupting_server if corrupts else server, metrics_url, plain=server)

    monkeypatch.setattr(ablation_groups, "start_services", start)
    serve_at(monkeypatch, "nowhere")
    monkeypatch.setattr("coppice.cli.bench.ablation.MODELS", tmp_path)
    # In the places of the bundled ones: an adapter of two masks, and a head of another target.
    save_adapter(SpaceAdapter(torch.zeros(2, 8), {}, ((0.0, (1.0, 1.0)),)), tmp_path / "space")
    (tmp_path / "early-head").mkdir()
    (tmp_path / "early-head" / "early_head.json").write_text("{}")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "def f(x):"}\n')
    arguments = [
        *("ablation", "--suite", suite, "--quick", "--prompts", str(tmp_path / "prompts.jsonl"), "--threads", "1"),
        *("--target", str(tiny_target), "--drafter", f"small-lm={tiny_target}", "--max-tokens", "4"),
        *("--temperature", "0", "--out", str(tmp_path / "out")),
        *(("--nodes", "31", "--rounds", "synchronous") if suite == "drafters" else ()),
    ]
    result = CliRunner().invoke(bench.app, arguments)
    assert result.exit_code == (1 if corrupts else 0), result.output
    name = "ablation" if suite == "drafters" else suite
    report = json.loads((tmp_path / "out" / f"{name}.json").read_text())
    assert (report["suite"], report["settings"]["max_tokens"], report["settings"]["num_runs"]) == (name, 4, 1)
    assert (tmp_path / "out" / f"{name}.png").is_file()
    if suite == "drafters":
        assert {(one.front.synchronous, one.front.max_nodes) for group in started for one in group.variants} == {
            (True, 31)
        }
        # Rounds that wait for all have no planner.
        assert not any("planner" in row["name"] for row in report["rows"])
        wrong = "coppice-on small-lm"
    else:
        assert report["settings"]["masks_and_groups"] == [[2, 1]]
        assert {row["group"] for row in report["rows"]} == {"drafting"}
        assert any("Early pruning is left out" in note for note in report["notes"])
        wrong = "coppice-on space k=2 g=1"
    assert (f"MISMATCH: {wrong} differs from coppice-off" in result.output) is corrupts
