"""Options of `coppice bench` that make no sense are named before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from coppice.cli import bench
from tests.unit.coppice.lab.bench.test_bench_command import serve_at

IN_PASS = ("ablation", "--suite", "in-pass")
BAD = (
    (("latency",), "--prompts", "missing.jsonl", "missing.jsonl"),
    (("latency",), "--target", "missing-target", "there is no directory missing-target"),
    (("latency",), "--drafter", "small-lm=missing-drafter", "--drafter: no checkpoint"),
    (("latency",), "--drafter", "diffusion=x", "--drafter: "),
    (("latency",), "--temperature", "-1", "--temperature: "),
    (("latency",), "--runs", "0", "--runs"),
    (("latency",), "--forms", "quick", "--forms: 'quick'"),
    (("latency",), "--delays", "5", "--delays"),
    (("peers",), "--prompts", "missing.jsonl", "missing.jsonl"),
    (("peers",), "--humaneval", "missing.jsonl", "missing.jsonl"),
    (("peers",), "--peers", "llama.cpp,vllm", "--peers: must be of transformers, llama.cpp, openvino, got vllm"),
    (("peers",), "--precisions", "q3", "--precisions: must be of f32, bf16, int8, got q3"),
    (("peers",), "--concurrency", "4,500", "--concurrency: at most 256"),
    (("throughput",), "--concurrency", "", "--concurrency"),
    (("throughput",), "--concurrency", "2,x", "--concurrency"),
    (("passes",), "--rows", "1,x", "--rows"),
    (("passes",), "--context", "0", "--context"),
    (("passes",), "--device", "tpu", "--device"),
    (("overhead",), "--requests", "", "--requests"),
    (("overhead",), "--nodes", "3", "--nodes"),
    (("load",), "--concurrency", "0", "--concurrency"),
    (("load",), "--rates", "0.5,x", "--rates"),
    (("load",), "--rates", "nan", "--rates"),
    (("load",), "--rates", "11", "--rates"),
    (("load",), "--output-tokens", "9,4", "--output-tokens"),
    (("load",), "--output-tokens", "", "--output-tokens"),
    (("load",), "--trace", "missing.csv", "--trace"),
    (("overload",), "--factors", "", "--factors"),
    (("overload",), "--leaving", "0.9", "--leaving"),
    (("cache",), "--systems", "9", "--prompts: 9 system prompts x 3 endings are made of 54"),
    (("cache",), "--endings", "0", "--endings"),
    (("cache",), "--drafter", "=x", "--drafter: "),
    (("ablation",), "--grid", "masks=x", "--grid masks"),
    (("ablation",), "--rounds", "square", "--rounds"),
    (("ablation",), "--parts", "sources,shapes", "--parts"),
    (("ablation",), "--grid", "gammas=4,65", "--grid gammas"),
    (("ablation",), "--grid", "batches=4", "--grid"),
    (("ablation",), "--suite", "overtaking", "--suite"),
    (IN_PASS, "--space", "nowhere", "--space"),
    (IN_PASS, "--early-head", "nowhere", "--early-head"),
    (IN_PASS, "--grid", "batches=0", "--grid batches"),
    (IN_PASS, "--grid", "trees=65", "--grid trees"),
    (IN_PASS, "--nodes", "2", "--nodes"),
)


@pytest.mark.parametrize(
    ("command", "option", "value", "message"), BAD, ids=[f"{one[0][-1]} {one[1]} {one[2]}" for one in BAD]
)
def test_a_bad_option_is_named_before_anything_starts(
    tiny_target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: tuple[str, ...],
    option: str,
    value: str,
    message: str,
) -> None:
    specs = serve_at(monkeypatch, "nowhere")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "def f(x):"}\n')
    arguments = [*command, "--out", str(tmp_path / "out")]
    if command != ("overhead",):
        arguments += ["--target", str(tiny_target)]
    if command not in (("overhead",), ("passes",)):
        arguments += ["--prompts", str(tmp_path / "prompts.jsonl"), "--drafter", f"small-lm={tiny_target}"]
    result = CliRunner(env={"COLUMNS": "400"}).invoke(bench.app, [*arguments, option, value])
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert not specs
    assert not (tmp_path / "out").exists()
