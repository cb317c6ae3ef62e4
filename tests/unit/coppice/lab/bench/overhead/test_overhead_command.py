"""`coppice bench overhead` as a user calls it, with tiny sizes: the real orchestrator between scripted peers."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from coppice.cli import bench
from tests.unit.coppice.lab.bench.schema import lost_fields


def test_rounds_cost_two_small_messages_per_peer_and_everything_is_written(tmp_path: Path) -> None:
    arguments = ["overhead", "--out", str(tmp_path), "--requests", "1,3", "--passes", "20", "--rounds", "40"]
    result = CliRunner().invoke(bench.app, arguments)
    assert result.exit_code == 0, result.output
    assert "rounds x3 cache" in result.output
    report = json.loads((tmp_path / "overhead.json").read_text())
    assert report["settings"]["requests"] == [1, 3]
    assert lost_fields(report, "overhead.json") == set()
    planner = [row for row in report["rows"] if row["kind"] == "planner"]
    assert [(row["requests"], row["sources"]) for row in planner] == [(1, 1), (1, 2), (3, 1), (3, 2)]
    assert all(row["passes"] == 20 and 0 < row["us_p50"] <= row["us_p99"] for row in planner)
    rounds = [row for row in report["rows"] if row["kind"] == "rounds"]
    assert [row["name"] for row in rounds] == [
        *("rounds x1", "rounds x1 cache", "rounds x3", "rounds x3 cache"),
        *("rounds x1 nodes=64", "rounds x1 nodes=64 cache"),
    ]
    for row in rounds:
        # The first round of a request is its prompt's, and has no draft.
        assert row["rounds"] - 2 * row["requests"] <= row["timed_rounds"] <= row["rounds"]
        # The way through peers, which have to receive and send, is part of what they see.
        assert 0 < row["inside_us_p50"] < row["outside_us_p50"]
        assert row["cpu_us_per_round"] > 0
        assert all(report["ratios"][f"{row['name']}.{peer}.messages"] <= 2 for peer in ("verifier", "drafter"))
        assert all(report["ratios"][f"{row['name']}.{peer}.largest-bytes"] <= 2048 for peer in ("verifier", "drafter"))
    # What the prefix cache adds to drafts shows in their size.
    way = "orchestrator to verifier"
    assert rounds[1]["largest_message"][way] > rounds[0]["largest_message"][way]
