"""`coppice bench` as a user calls it, with a server that is there already."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coppice.cli import bench
from coppice.cli import topology as cli_topology
from coppice.cli.__main__ import app
from coppice.cli.child import ChildError
from coppice.cli.topology import DrafterSpec, TopologySpec
from coppice.lab.bench import services
from tests.http_client import gateway_to


class RunningTopology:
    """Stands for services that run already, or whose drafter has died; the gateway, if any, begins here."""

    def __init__(self, spec: TopologySpec, address: str, error: ChildError | None = None) -> None:
        self.address = address
        self.http_address = ""
        self._spec = spec
        self._error = error
        self._stack = contextlib.AsyncExitStack()

    async def start(self) -> None:
        if self._spec.http_port:
            self.http_address = await self._stack.enter_async_context(gateway_to(self.address))

    async def failed(self) -> ChildError:
        if self._error is None:
            await asyncio.Event().wait()
        assert self._error is not None
        return self._error

    async def stop(self) -> None:
        await self._stack.aclose()


def serve_at(monkeypatch: pytest.MonkeyPatch, address: str, error: ChildError | None = None) -> list[TopologySpec]:
    specs: list[TopologySpec] = []

    def topology(spec: TopologySpec, *_: object) -> RunningTopology:
        specs.append(spec)
        return RunningTopology(spec, address, error)

    for module in (services, cli_topology):
        monkeypatch.setattr(module, "Topology", topology)
    return specs


def _latency_arguments(target: Path, directory: Path) -> list[str]:
    path = directory / "prompts.jsonl"
    path.write_text('{"prompt": "def f(x):"}\n')
    return [
        *("latency", "--prompts", str(path), "--target", str(target), "--drafter", f"small-lm={target}"),
        *("--out", str(directory / "out"), "--max-tokens", "4", "--runs", "1", "--threads", "1"),
    ]


def test_latency_writes_json_and_plot_and_prints_a_table(
    tiny_target: Path, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = serve_at(monkeypatch, server)
    result = CliRunner().invoke(bench.app, _latency_arguments(tiny_target, tmp_path))
    assert result.exit_code == 0, result.output
    assert specs == [TopologySpec(str(tiny_target), (DrafterSpec("small-lm", str(tiny_target)),), threads=1)]
    assert "coppice-on T=1" in result.output
    assert json.loads((tmp_path / "out" / "latency.json").read_text())["settings"]["threads"] == 1
    assert (tmp_path / "out" / "latency.png").is_file()


def test_a_failing_server_is_one_line_and_exit_code_1(
    tiny_target: Path, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_at(monkeypatch, server)
    arguments = [*_latency_arguments(tiny_target, tmp_path), "--temperature", "2"]
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 1
    assert "coppice: coppice-off: INVALID_ARGUMENT: too hot" in result.output


def test_a_service_that_dies_ends_the_benchmark(
    tiny_target: Path, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_at(monkeypatch, server, ChildError("drafter small-lm ended with exit code 1"))
    result = CliRunner().invoke(app, ["bench", *_latency_arguments(tiny_target, tmp_path)])
    assert result.exit_code == 1
    assert "coppice: drafter small-lm ended with exit code 1" in result.output
    assert not (tmp_path / "out").exists()
