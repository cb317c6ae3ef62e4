"""`coppice simulate` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coppice.cli.__main__ import app
from coppice.lab.simulator.profile import Profile, profile_to_json
from tests.unit.coppice.lab.simulator.machines import right_trace, usual_machine


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profile_to_json(Profile(usual_machine(), (right_trace(5), right_trace(2))))))
    return path


def simulate(profile: Path, *arguments: str) -> Any:
    return CliRunner().invoke(app, ["simulate", "--profile", str(profile), "--duration", "1", *arguments])


def test_it_prints_a_table_and_writes_what_it_says(profile: Path, tmp_path: Path) -> None:
    result = simulate(profile, "--requests", "1,4", "--policy", "off", "--policy", "planner", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "simulate.json").read_text())
    assert [row["name"] for row in report["rows"]] == ["off c1", "planner c1", "off c4", "planner c4"]
    for row in report["rows"]:
        assert f"{row['tokens_per_s']:.0f}" in result.output
        assert (row["drafters_needed"] is None) == (row["policy"] == "off")
    assert report["rows"][1]["tokens_per_s"] > report["rows"][0]["tokens_per_s"]
    # As other suites' reports do, it says where it comes from.
    assert {"machine", "versions", "command", "commit", "dirty"} <= report.keys()
    assert report["command"].startswith("coppice ")


def test_json_is_one_object_and_the_same_each_time(profile: Path) -> None:
    arguments = ("--arrivals-per-s", "2", "--policy", "fixed=3", "--drafters", "2", "--separate-machines", "--json")
    first, second = (json.loads(simulate(profile, *arguments).stdout) for _ in range(2))
    assert first == second
    assert [row["load"] for row in first["rows"]] == ["r2/s"]
    assert first["settings"]["separate_machines"]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--requests", "0"),
        ("--requests", ""),
        ("--requests", "9999"),
        ("--arrivals-per-s", "-1"),
        ("--arrivals-per-s", "inf"),
        ("--policy", "fixed"),
        ("--verifiers", "0"),
        ("--drafter-speed", "0"),
        ("--output-tokens", "9,4"),
        ("--profile", "missing.json"),
        ("--against", "missing.json"),
    ],
)
def test_a_bad_option_is_named(profile: Path, option: str, value: str) -> None:
    result = simulate(profile, option, value)
    assert result.exit_code == 2
    assert option in result.output


def load_report(**settings: object) -> dict[str, Any]:
    rows = [
        {
            "name": f"{policy} c{concurrency}",
            "policy": policy,
            "part": "closed",
            "concurrency": concurrency,
            "tokens_per_s": 100.0,
            "mean_acceptance_length": 2.0,
        }
        for concurrency in (1, 3)
        for policy in ("off", "fixed-small")
    ]
    facts = {
        "policies": {"off": "off", "fixed-small": "fixed=4"},
        "prompt_tokens": [60, 80],
        "output_tokens": [16, 48],
        "server_max_nodes": 15,
        "duration_s": 1.0,
        "temperature": 0.0,
        "seed": 0,
    }
    return {"suite": "load", "rows": [*rows, {"part": "step"}], "settings": {**facts, **settings}}


def test_a_measured_run_is_simulated_row_by_row(profile: Path, tmp_path: Path) -> None:
    path = tmp_path / "load.json"
    path.write_text(json.dumps(load_report()))
    result = simulate(profile, "--against", str(path), "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "simulate.json").read_text())
    assert [row["name"] for row in report["rows"]] == ["off c1", "fixed-small c1", "off c3", "fixed-small c3"]
    for row in report["rows"]:
        assert row["simulated/measured"] == pytest.approx(row["tokens_per_s"] / 100, abs=1e-3)
    # The same closed load, asked for by itself.
    alone = simulate(profile, "--requests", "3", "--policy", "off", "--output-tokens", "16,48", "--json")
    [row] = json.loads(alone.stdout)["rows"]
    assert report["rows"][2]["tokens_per_s"] == pytest.approx(row["tokens_per_s"], rel=0.15)
    sizes = sorted(abs(row["simulated/measured"] - 1) for row in report["rows"])
    assert report["ratios"] == {
        "simulator.error": pytest.approx((sizes[1] + sizes[2]) / 2, abs=1e-4),
        "simulator.error.max": pytest.approx(sizes[-1], abs=1e-4),
    }
    assert "median" in result.output


@pytest.mark.parametrize(
    ("report", "named"),
    [
        ({"suite": "latency"}, "bench load"),
        (load_report(temperature=1.0), "T=1"),
        ({**load_report(), "rows": []}, "no closed load"),
        ({**load_report(), "settings": {}}, "policies and prompt_tokens"),
    ],
)
def test_what_cannot_be_compared_with_is_refused_with_the_reason(
    profile: Path, tmp_path: Path, report: dict[str, Any], named: str
) -> None:
    path = tmp_path / "load.json"
    path.write_text(json.dumps(report))
    result = simulate(profile, "--against", str(path))
    assert result.exit_code == 2
    assert named in " ".join(result.output.replace("│", " ").split())
