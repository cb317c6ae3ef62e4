"""`coppice bench overload` as a user calls it, with a server that is there already."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coppice.cli import bench
from coppice.lab.bench import overload
from coppice.lab.bench.client import Meter
from coppice.lab.bench.counters import Counters
from tests.unit.coppice.lab.bench.schema import lost_fields
from tests.unit.coppice.lab.bench.test_bench_command import serve_at


@contextlib.asynccontextmanager
async def nothing_to_see(meter: Meter, interval_s: float) -> AsyncIterator[list[tuple[float, Counters]]]:
    """Of a server without metrics."""
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/metrics", meter.urls[0])
    yield []


def _arguments(target: Path, directory: Path, *more: str) -> list[str]:
    prompts = directory / "prompts.jsonl"
    prompts.write_text('{"prompt": "def f(x): return x"}\n{"prompt": "class A: pass # nothing"}\n')
    return [
        *("overload", "--prompts", str(prompts), "--target", str(target), "--drafter", f"small-lm={target}"),
        *("--out", str(directory / "out"), "--output-tokens", "2,4", "--runs", "1", "--threads", "1"),
        *("--duration", "0.3", "--recovery", "0.3", "--factors", "2", "--concurrency", "2", *more),
    ]


def test_overload_writes_json_plot_and_page_and_starts_a_server_with_its_bounds(
    tiny_target: Path, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs, out = serve_at(monkeypatch, server), tmp_path / "out"
    monkeypatch.setattr(overload, "watching", nothing_to_see)
    result = CliRunner().invoke(bench.app, _arguments(tiny_target, tmp_path, "--max-token-ms", "40"))
    assert result.exit_code == 0, result.output
    settings = dict(specs[0].settings)
    assert (settings["MAX_TOKEN_MS"], settings["MAX_QUEUE_WAIT_S"]) == ("40", "0.15")
    report = json.loads((out / "overload.json").read_text())
    assert [row["name"] for row in report["rows"]] == ["x0.7", "x2"]
    assert all(row["num_identical"] == row["num_compared"] > 0 for row in report["rows"])
    assert "overload.recovery_s.x2" in report["ratios"]
    assert report["settings"]["saturation_requests_per_s"] > 0
    # A picture of the largest load had points of its own when that was measured.
    assert lost_fields(report, "overload.json") == {"course"}
    assert "Requests by load" in result.output


def test_the_bound_is_a_multiple_of_what_a_request_alone_takes(
    tiny_target: Path, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = serve_at(monkeypatch, server)
    monkeypatch.setattr(overload, "watching", nothing_to_see)
    result = CliRunner().invoke(bench.app, _arguments(tiny_target, tmp_path, "--token-ratio", "5"))
    assert result.exit_code == 0, result.output
    alone, bounded = specs
    assert not alone.settings
    report = json.loads((tmp_path / "out" / "overload.json").read_text())
    alone_ms, bound_ms = (report["settings"][name] for name in ("alone_token_ms", "max_token_ms"))
    assert alone_ms > 0
    assert bound_ms == pytest.approx(5 * alone_ms, abs=1e-3)
    assert float(dict(bounded.settings)["MAX_TOKEN_MS"]) == pytest.approx(bound_ms, rel=1e-4)


def test_changed_tokens_fail_the_command_and_are_still_written(
    tiny_target: Path, corrupting_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_at(monkeypatch, corrupting_server)
    monkeypatch.setattr(overload, "watching", nothing_to_see)
    result = CliRunner().invoke(bench.app, _arguments(tiny_target, tmp_path))
    assert result.exit_code == 1
    assert (tmp_path / "out" / "overload.json").is_file()
    assert "MISMATCH: x2: " in result.output
