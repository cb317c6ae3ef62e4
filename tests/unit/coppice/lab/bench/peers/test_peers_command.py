"""`coppice bench peers` as a user calls it, without any other engine, on a server that is there already."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coppice.cli import bench
from coppice.lab.bench.peers.server import Engine
from tests.unit.coppice.lab.bench.test_bench_command import serve_at

OURS = ["coppice-off", "coppice-on", "coppice-on small-lm", "coppice-on prompt-lookup", "coppice-on cache"]
PROMPTS = [{"category": "writing", "prompt": "def f(x):"}, {"category": "coding", "prompt": "class A:"}]


def arguments(target: Path, directory: Path) -> list[str]:
    paths = directory / "prompts.jsonl", directory / "humaneval.jsonl"
    paths[0].write_text("\n".join(map(json.dumps, PROMPTS)))
    paths[1].write_text(json.dumps({"task_id": "Python/0", "prompt": "import os"}))
    return [
        *("peers", "--prompts", str(paths[0]), "--per-category", "1", "--humaneval", str(paths[1])),
        *("--target", str(target), "--drafter", f"small-lm={target}", "--precisions", "f32"),
        *("--out", str(directory / "out"), "--max-tokens", "4", "--runs", "1", "--threads", "1"),
        *("--temperature", "0", "--concurrency", "1,2"),
    ]


@pytest.mark.parametrize("fixture", ["server", "corrupting_server"])
def test_peers_that_are_missing_are_rows_and_the_others_are_compared(
    fixture: str, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    serve_at(monkeypatch, request.getfixturevalue(fixture))
    monkeypatch.setattr(Engine, "interpreter", lambda _: None)
    result = CliRunner().invoke(bench.app, arguments(tiny_target, tmp_path))
    assert result.exit_code == (0 if fixture == "server" else 1), result.output
    report = json.loads((tmp_path / "out" / "peers.json").read_text())
    rows = {row["contender"]: row for row in report["rows"]}
    there = [*OURS, "transformers", "transformers-lookup", "transformers-assisted"]
    assert [name for name, row in rows.items() if row["missing"] is None] == there
    assert rows["llama.cpp-f32 draft-model"]["missing"] == "xllamacpp is not installed (make peers)"
    assert rows["openvino-q8_0"]["missing"] == "openvino_genai is not installed (make peers)"
    assert rows["transformers-lookup"]["num_identical_to_transformers"] == 3
    assert (rows["coppice-off"]["num_near_ties"], rows["coppice-off"]["num_apart"]) == (0, 0)
    wanted = {"on/off", "on/best-speculative-peer", "on/off@humaneval", "planner/off.c2", "planner/off.min"}
    assert wanted <= report["ratios"].keys()
    assert "on/llama.cpp-bf16 is missing: bf16 was not asked for (--precisions)" in report["notes"]
    assert {row["kind"] for row in report["kinds"].values()} == {"all", "writing", "coding", "humaneval"}
    assert "prompt_lookup_num_tokens=10" in report["arms"]["transformers-lookup"]
    assert "transformers-continuous x2" in report["at_once"]
    assert bool(report["mismatches"]) == (fixture == "corrupting_server")
    assert (tmp_path / "out" / "peers.png").is_file()


def test_a_peer_that_is_not_asked_for_is_a_row_that_says_so(
    tiny_target: Path, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_at(monkeypatch, server)
    monkeypatch.setattr(Engine, "interpreter", lambda _: None)
    options = ["--peers", "openvino", "--concurrency", ""]
    result = CliRunner().invoke(bench.app, [*arguments(tiny_target, tmp_path), *options])
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "out" / "peers.json").read_text())
    rows = {row["contender"]: row for row in report["rows"]}
    assert rows["transformers"]["missing"] == "not asked for (--peers)"
    # There is nothing to compare with.
    assert rows["coppice-off"]["identical_to"] is None
    assert not report["at_once"]
    assert "hard/off.min is missing: no hard prompts were asked for (--hard)" in report["notes"]
    assert "planner/off.min is missing: no requests at once were asked for (--concurrency)" in report["notes"]
