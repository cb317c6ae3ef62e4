"""The benchmark of many requests at once: what it asks of its contenders, and what it makes of their times."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from coppice.cli import bench
from coppice.lab.bench.contenders import OFF, ON, Task
from coppice.lab.bench.harness.experiment import Samples
from coppice.lab.bench.throughput import (
    BatchCompletion,
    BatchContender,
    BatchedGenerate,
    BatchSample,
    ContinuousBatching,
    CoppiceBatch,
    measure_batches,
    throughput_ratios,
    throughput_rows,
    unequal,
)
from coppice.lab.bench.transformers_baseline import load_model, quiet_transformers
from tests.unit.coppice.lab.bench.schema import lost_fields
from tests.unit.coppice.lab.bench.test_bench_command import serve_at

PROMPTS = ([5, 6, 7], [1, 2, 3, 4, 5, 6, 7, 8], [9], [200, 100])
TOKENS = 5


class Scripted:
    """Takes a known time and gives known tokens."""

    note = "scripted"

    def __init__(self, name: str, seconds: float, token: int = 1, missing: int = 0) -> None:
        self.name = name
        self._seconds = seconds
        self._token = token
        self._missing = missing
        self.asked: list[list[Task]] = []

    def complete(self, tasks: Sequence[Task]) -> BatchCompletion:
        self.asked.append(list(tasks))
        lengths = [task.max_tokens - self._missing for task in tasks]
        return BatchCompletion(tuple((self._token,) * length for length in lengths), self._seconds)


def _greedy(model_dir: Path, prompt: Sequence[int]) -> tuple[int, ...]:
    """Greedy decoding by the slow obvious loop."""
    model, context = load_model(model_dir), list(prompt)
    with torch.inference_mode():
        for _ in range(TOKENS):
            context.append(int(model(input_ids=torch.tensor([context])).logits[0, -1].argmax()))
    return tuple(context[len(prompt) :])


MAKERS: dict[str, Callable[[Path, str], BatchContender]] = {
    "batched": lambda target, _: BatchedGenerate(load_model(target), 1),
    "continuous": lambda target, _: ContinuousBatching(load_model(target), 1, longest=8 + TOKENS),
    "coppice": lambda _, server: CoppiceBatch(ON, server, "auto"),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_every_contender_gives_each_request_its_own_greedy_tokens(kind: str, tiny_target: Path, server: str) -> None:
    quiet_transformers()
    contender = MAKERS[kind](tiny_target, server)
    for prompts in (PROMPTS, PROMPTS[:1]):
        tasks = [Task(tuple(prompt), TOKENS, 0.0, 0) for prompt in prompts]
        completion = contender.complete(tasks)
        assert completion.wall_s > 0
        assert completion.token_ids == tuple(_greedy(tiny_target, prompt) for prompt in prompts)


def test_contenders_take_turns_at_the_same_batches() -> None:
    first, second = Scripted(OFF, 1.0), Scripted(ON, 1.0)
    samples = measure_batches([first, second], PROMPTS, (1, 3), 2, 4)
    assert [sample.contender for sample in samples] == [OFF, ON, ON, OFF] * 2
    assert first.asked == second.asked
    sizes = [(len(tasks), tasks[0].max_tokens) for tasks in first.asked]
    assert sizes == [(1, 8), (1, 4), (1, 4), (3, 8), (3, 4), (3, 4)]
    assert first.asked[4] != first.asked[5], "runs take other prompts"


def test_rows_and_ratios_are_medians_within_runs() -> None:
    contenders = [Scripted("other", 1.0), Scripted(OFF, 1.0), Scripted(ON, 1.0)]
    seconds = {"other": [1.0, 1.0, 1.0], OFF: [1.0, 0.5, 4.0], ON: [0.25, 0.5, 0.5]}
    samples = Samples(
        BatchSample(name, 2, run, BatchCompletion(((1, 1), (1, 1)), wall_s))
        for name, times in seconds.items()
        for run, wall_s in enumerate(times)
    )
    rows = throughput_rows(samples, contenders)
    assert [row["tokens_per_s"] for row in rows] == [4.0, 4.0, 8.0]
    assert (rows[1]["tokens_per_s_min"], rows[1]["tokens_per_s_max"]) == (1.0, 8.0)
    assert rows[0]["num_requests"] == 6
    assert throughput_ratios(samples).values == {"off/other.x2": 1.0, "on/off.x2": 4.0}
    assert unequal(rows) == []


def test_other_tokens_with_speculation_are_a_mismatch() -> None:
    contenders = [Scripted("other", 1.0, token=3), Scripted(OFF, 1.0), Scripted(ON, 1.0, token=2)]
    rows = throughput_rows(measure_batches(contenders, PROMPTS, [2], 1, 4), contenders)
    assert unequal(rows) == ["coppice-on x2: 2 of 2 outputs differ"]


def _arguments(target: Path, directory: Path, *more: str) -> list[str]:
    path = directory / "prompts.jsonl"
    path.write_text('{"prompt": "def f(x):"}\n{"prompt": "class A:"}\n')
    return [
        *("throughput", "--prompts", str(path), "--target", str(target), "--drafter", f"small-lm={target}"),
        *("--out", str(directory / "out"), "--max-tokens", "4", "--runs", "1", "--threads", "1", *more),
    ]


def test_throughput_writes_json_and_plot_and_prints_tables(
    tiny_target: Path, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_at(monkeypatch, server)
    result = CliRunner().invoke(bench.app, _arguments(tiny_target, tmp_path, "--concurrency", "1,3"))
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "out" / "throughput.json").read_text())
    assert len(report["rows"]) == 4 * 2
    assert "off/transformers-batched.x3" in report["ratios"]
    assert report["mismatches"] == []
    assert lost_fields(report, "throughput.json") == set()
    assert (tmp_path / "out" / "throughput.png").is_file()
    assert "on/off" in result.output
