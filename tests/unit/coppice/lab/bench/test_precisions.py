"""Precisions of the latency suite: ours, transformers, and llama.cpp, in turn."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from coppice.lab.bench.client import Task
from coppice.lab.bench.comparison import Plan, Setup
from coppice.lab.bench.harness.experiment import BenchmarkError, Samples
from coppice.lab.bench.peers.server import LLAMA_CPP, Engine, serving
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
    monkeypatch.setattr(Engine, "interpreter", lambda _: None)
    setup = Setup(tiny_target, (Prompt("a", "a"),), Plan(1, 4, (0.0,), seed=0), threads=1)
    served = {PRECISIONS["f32"]: server, PRECISIONS["bf16"]: server}
    async with AsyncExitStack() as stack:
        found = await in_precisions(setup, stack, served, "float32", 64)
        assert [one.name for one in found] == ["off-f32", "off-bf16", "transformers-bf16"]
        assert "bfloat16" in found[2].note
        [answer] = (await found[2].complete([Task((1, 2), 4, 0.0, seed=0)])).answers
    assert len(answer.token_ids) == 4


@pytest.mark.skipif(LLAMA_CPP.interpreter() is None, reason="needs xllamacpp")
async def test_llama_cpp_serves_an_exported_model(tmp_path: Path) -> None:
    from coppice.checkpoints.gguf_export import export_gguf
    from tests.unit.coppice.checkpoints.test_gguf import write_model

    export_gguf(write_model(tmp_path / "source"), tmp_path / "file.gguf", "f32")
    options = {"model": str(tmp_path / "file.gguf"), "threads": 1, "context": 64}
    async with serving(LLAMA_CPP, "llama.cpp-f32", options) as llama:
        assert "CPU" in llama.note
        [answer] = (await llama.complete([Task((5, 6, 7), 8, 0.0, seed=0)])).answers
    assert len(answer.token_ids) == 8
