"""`coppice bench load` as a user calls it, with a server that is there already."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coppice.cli import bench
from coppice.lab.bench.harness.experiment import BenchmarkError
from coppice.lab.simulator.policies import Policy
from coppice.lab.simulator.scenario import read_load_report
from tests.unit.coppice.lab.bench.schema import lost_fields
from tests.unit.coppice.lab.bench.test_bench_command import serve_at

RATIOS = {"planner/off.c2", "planner/off.min", "planner/best-fixed.c2", "planner/off.goodput.trace", "step.settle_s"}


def _arguments(target: Path, directory: Path, *more: str) -> list[str]:
    prompts, trace = directory / "prompts.jsonl", directory / "trace.csv"
    prompts.write_text('{"prompt": "def f(x):"}\n{"prompt": "class A:"}\n')
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,1,2\n2023-11-16 18:17:04,1,9\n")
    return [
        *("load", "--prompts", str(prompts), "--target", str(target), "--drafter", f"small-lm={target}"),
        *("--out", str(directory / "out"), "--output-tokens", "2,4", "--runs", "1", "--threads", "1"),
        *("--duration", "0.25", "--rates", "", "--step", "0", "--concurrency", "1", "--no-transformers", *more),
    ]


def test_load_writes_json_and_plot_and_prints_tables(
    tiny_target: Path, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_at(monkeypatch, server)
    more = ("--concurrency", "2", "--rates", "0.5", "--step", "2", "--trace", str(tmp_path / "trace.csv"))
    arguments = _arguments(tiny_target, tmp_path, *more, "--trace-speed", "8")
    result = CliRunner().invoke(bench.app, arguments)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "out" / "load.json").read_text())
    policies, loads = ("off", "fixed-small", "fixed-large", "planner"), ("c2", "r0.5", "trace", "step")
    assert [row["name"] for row in report["rows"]] == [f"{policy} {load}" for load in loads for policy in policies]
    assert set(report["ratios"]) >= RATIOS
    assert set(report["ratio_spread"]) == set(report["ratios"])
    by_name = {row["name"]: row for row in report["rows"]}
    # Two arrivals, an eighth of a second apart.
    assert [by_name[f"{policy} trace"]["num_completed"] for policy in policies] == [2, 2, 2, 2]
    # What the fake server says of its rounds.
    assert [by_name[f"{policy} c2"]["nodes_per_round"] for policy in policies] == [0.0, 3.0, 3.0, 3.0]
    assert "budget: 20" in by_name["fixed-large c2"]["note"]
    assert all(row["identical"] for row in report["rows"])
    assert len(report["step_series"]) == 4
    assert lost_fields(report, "load.json") == set()
    assert all(0 < by_name[f"{policy} c2"]["warm_up_s"] < 30 for policy in policies)
    assert report["settings"]["saturation_tokens_per_s"] > 0
    # What the simulator needs to do the same.
    settings = read_load_report(tmp_path / "out" / "load.json")["settings"]
    assert {name: str(Policy.parse(text)) for name, text in settings["policies"].items()} == {
        "off": "off",
        "fixed-small": "fixed=4",
        "fixed-large": "fixed=20",
        "planner": "planner",
    }
    assert len(settings["prompt_tokens"]) == 2
    assert {"machine", "versions", "command", "commit"} <= set(report)
    assert (tmp_path / "out" / "load.png").is_file()
    assert "Passed: none of " in (tmp_path / "out" / "load.html").read_text()
    for text in ("planner/best-fixed.min", "goodput", "requests at once and back"):
        assert text in result.output


def test_transformers_has_its_turn_beside_the_closed_loads(
    tiny_target: Path, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_at(monkeypatch, server)
    result = CliRunner().invoke(bench.app, _arguments(tiny_target, tmp_path, "--transformers"))
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "out" / "load.json").read_text())
    rows = [row for row in report["rows"] if row["part"] == "baseline"]
    assert [row["name"] for row in rows] == ["transformers-batched c1", "transformers-continuous c1"]
    # The fake server says what the same checkpoint says.
    assert [row["num_identical_to_off"] for row in rows] == [1, 1]
    best = max(row["tokens_per_s"] for row in rows)
    speed = next(row["tokens_per_s"] for row in report["rows"] if row["name"] == "off c1")
    assert report["ratios"]["off/transformers.c1"] == pytest.approx(speed / best, rel=0.01)


def test_changed_tokens_fail_the_command_and_are_still_written(
    tiny_target: Path, corrupting_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_at(monkeypatch, corrupting_server)
    result = CliRunner().invoke(bench.app, _arguments(tiny_target, tmp_path, "--duration", "0.5"))
    assert result.exit_code == 1
    report = json.loads((tmp_path / "out" / "load.json").read_text())
    assert [row["identical"] for row in report["rows"]] == [True, False, False, False]
    assert "MISMATCH: planner c1: " in result.output


def test_conversations_over_http_whose_clients_may_leave(
    tiny_target: Path, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_at(monkeypatch, server)
    arguments = _arguments(tiny_target, tmp_path, "--protocol", "http", "--turns", "2", "--leaving", "0.3")
    texts = ("System.", "a", "b", "c", "d", "too many")
    prompts = tmp_path / "turns.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    arguments[arguments.index("--prompts") + 1] = str(prompts)
    more = ("--rates", "0.5", "--duration", "0.5", "--lengths", "lognormal", "--concurrency", "2")
    result = CliRunner().invoke(bench.app, [*arguments, *more])
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "out" / "load.json").read_text())
    settings = report["settings"]
    assert (settings["protocol"], settings["turns"], settings["num_conversations"]) == ("http", 2, 2)
    # One token a byte: what the second turn has more are the first answer and its own text.
    first, second = settings["prompt_tokens"][:2]
    assert first == len("System.\n\na")
    assert first + len("\nb") < second <= first + 4 * len("\ufffd".encode()) + len("\n\nb")
    assert all(row["num_completed"] and row["identical"] for row in report["rows"])
    page = (tmp_path / "out" / "load.html").read_text()
    assert "conversations of 2 turns" in page
    assert "over http" in page


def test_a_conversation_that_does_not_fit_is_refused(
    tiny_target: Path, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_at(monkeypatch, server)
    arguments = _arguments(tiny_target, tmp_path, "--turns", "2")
    prompts = tmp_path / "turns.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": 45 * letter}) + "\n" for letter in "abc"))
    arguments[arguments.index("--prompts") + 1] = str(prompts)
    result = CliRunner().invoke(bench.app, arguments)
    assert isinstance(result.exception, BenchmarkError)
    assert "fewer --turns" in str(result.exception)


@pytest.mark.parametrize("option", ["--protocol", "--lengths"])
def test_an_unknown_word_is_refused(tiny_target: Path, tmp_path: Path, option: str) -> None:
    result = CliRunner().invoke(bench.app, _arguments(tiny_target, tmp_path, option, "soap"))
    assert result.exit_code == 2
    assert "must be one of" in result.output
