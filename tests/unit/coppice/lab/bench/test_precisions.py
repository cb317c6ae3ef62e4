"""Precisions of the latency suite: ours, transformers, and llama.cpp, in turn."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from coppice.lab.bench import llama_cpp
from coppice.lab.bench.client import Task
from coppice.lab.bench.comparison import Plan, Setup
from coppice.lab.bench.harness.experiment import BenchmarkError, Samples
from coppice.lab.bench.llama_cpp import LlamaCpp, serving
from coppice.lab.bench.precisions import PRECISIONS, in_precisions, parse_precisions, precision_ratios
from coppice.lab.bench.prompts import Prompt
from tests.unit.coppice.lab.bench.made_up import sample


def test_ratios_compare_within_a_precision() -> None:
    walls = {"off-bf16": 1.0, "llama.cpp-bf16": 2.0, "transformers-bf16": 3.0, "off-f32": 4.0, "llama.cpp-f32": 2.0}
    samples = Samples(sample(name, wall, temperature=t) for name, wall in walls.items() for t in (0.0, 1.0))
    found = precision_ratios(samples, PRECISIONS.values())
    expected = {"off-bf16/llama.cpp-bf16": 2.0, "off-bf16/transformers-bf16": 3.0, "off-f32/llama.cpp-f32": 0.5}
    assert found == {f"{name}{at}": [value] for at in ("", "@T1") for name, value in expected.items()}


def test_precisions_are_named() -> None:
    assert parse_precisions("bf16, f32,bf16") == (PRECISIONS["bf16"], PRECISIONS["f32"])
    assert parse_precisions("") == ()
    with pytest.raises(BenchmarkError, match=r"must be of f32, bf16, int8, got q3"):
        parse_precisions("f32,q3")


async def test_transformers_is_there_once_per_dtype(
    tiny_target: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_cpp, "is_installed", lambda: False)
    setup = Setup(tiny_target, (Prompt("a", "a"),), Plan(1, 4, (0.0,), seed=0), threads=1)
    served = {PRECISIONS["f32"]: server, PRECISIONS["bf16"]: server}
    async with AsyncExitStack() as stack:
        found = await in_precisions(setup, stack, served, "float32", 64)
        assert [one.name for one in found] == ["off-f32", "off-bf16", "transformers-bf16"]
        assert "bfloat16" in found[2].note
        [answer] = (await found[2].complete([Task((1, 2), 4, 0.0, seed=0)])).answers
    assert len(answer.token_ids) == 4


@contextmanager
def answering(answer: dict[str, Any]) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """Address of a server that gives every request this answer, and the requests it had."""
    asked: list[tuple[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def test_llama_cpp_is_asked_for_the_whole_distribution_and_nothing_cached() -> None:
    timings = {"prompt_ms": 250.0, "predicted_ms": 750.0}
    with answering({"tokens": [5, 6, 7], "timings": timings}) as (address, requests):
        llama = LlamaCpp("llama.cpp-f32", "", address)
        [answer] = (await llama.complete([Task((1, 2), 3, 0.7, seed=9)])).answers
    assert answer.token_ids == (5, 6, 7)
    assert answer.deltas[0].at_s == 0.25
    assert answer.completion is not None
    assert answer.completion.timing.forward_ms == 1000.0
    [(path, asked)] = requests
    assert path == "/completion"
    assert (asked["prompt"], asked["n_predict"], asked["seed"], asked["temperature"]) == ([1, 2], 3, 9, 0.7)
    # No top-k, top-p or min-p, which it has by default.
    assert asked["samplers"] == ["temperature"]
    assert asked["ignore_eos"]
    assert not asked["cache_prompt"]


async def test_an_answer_that_is_none_ends_the_benchmark() -> None:
    with pytest.raises(BenchmarkError, match=r"llama\.cpp-f32"):
        await LlamaCpp("llama.cpp-f32", "", "http://127.0.0.1:9").complete([Task((1,), 1, 0.0, seed=0)])


@pytest.mark.skipif(not llama_cpp.is_installed(), reason="needs xllamacpp")
async def test_llama_cpp_serves_an_exported_model(tmp_path: Path) -> None:
    from coppice.checkpoints.gguf_export import export_gguf
    from tests.unit.coppice.checkpoints.test_gguf import write_model

    export_gguf(write_model(tmp_path / "source"), tmp_path / "file.gguf", "f32")
    async with serving("llama.cpp-f32", tmp_path / "file.gguf", 1, 64) as llama:
        assert "CPU" in llama.note
        [answer] = (await llama.complete([Task((5, 6, 7), 8, 0.0, seed=0)])).answers
    assert len(answer.token_ids) == 8
