"""transformers' ways on a tiny random model, against the obvious loop, and the benchmark of many requests at once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from coppice.cli import bench
from coppice.client import Client
from coppice.lab.bench.client import OFF, ON, Answer, Contender, Mode, Policy, Server, Task
from coppice.lab.bench.harness.experiment import BenchmarkError, Samples
from coppice.lab.bench.throughput import IDENTICAL, throughput_ratios, throughput_rows
from coppice.lab.bench.transformers_baseline import (
    BatchedGenerate,
    ContinuousBatching,
    Generate,
    load_model,
    quiet_transformers,
    top_two_gap,
)
from tests.unit.coppice.lab.bench.made_up import Named, sample
from tests.unit.coppice.lab.bench.schema import lost_fields
from tests.unit.coppice.lab.bench.test_bench_command import serve_at

PROMPTS = ([5, 17, 200, 31], [1, 2, 3, 4, 5, 6, 7, 8], [9], [200, 100])
TOKENS = 12


@pytest.fixture(autouse=True)
def _quiet() -> None:
    quiet_transformers()


def _greedy(model_dir: Path, prompt: Sequence[int]) -> tuple[int, ...]:
    """Greedy decoding by the slow obvious loop, past every EOS."""
    model, context = load_model(model_dir), list(prompt)
    with torch.inference_mode():
        for _ in range(TOKENS):
            context.append(int(model(input_ids=torch.tensor([context])).logits[0, -1].argmax()))
    return tuple(context[len(prompt) :])


@pytest.mark.parametrize("kind", ["plain", "assisted", "batched", "continuous", "ours"])
async def test_every_contender_gives_each_request_its_own_greedy_tokens(
    kind: str, tiny_target: Path, server: str
) -> None:
    target = load_model(tiny_target)
    async with Client(server) as client:
        makers: dict[str, Contender] = {
            "plain": Generate(target, 1),
            "assisted": Generate(target, 1, load_model(tiny_target)),
            "batched": BatchedGenerate(target, 1),
            "continuous": ContinuousBatching(target, 1, longest=8 + TOKENS),
            "ours": Server(client, Policy(ON, Mode.MODE_AUTO)),
        }
        for prompts in (PROMPTS[:1],) if kind in ("plain", "assisted") else (PROMPTS, PROMPTS[:1]):
            batch = await makers[kind].complete([Task(tuple(prompt), TOKENS, 0.0, 0) for prompt in prompts])
            assert batch.wall_s > 0
            assert [one.token_ids for one in batch.answers] == [_greedy(tiny_target, prompt) for prompt in prompts]


@pytest.mark.parametrize("is_assisted", [False, True], ids=["plain", "assisted"])
async def test_one_stream_is_timed_pass_by_pass_and_sampled_by_its_seed(tiny_target: Path, is_assisted: bool) -> None:
    contender = Generate(load_model(tiny_target), 1, load_model(tiny_target) if is_assisted else None)

    async def complete(temperature: float, seed: int) -> Answer:
        [one] = (await contender.complete([Task((5, 17, 200, 31), 24, temperature, seed)])).answers
        return one

    greedy = await complete(0.0, 0)
    assert greedy.ttft_s is not None
    assert greedy.completion is not None
    assert 0 < greedy.ttft_s < greedy.e2e_s
    assert 0 < greedy.completion.timing.forward_ms < 1000 * greedy.e2e_s
    rounds = greedy.completion.speculation.rounds
    assert sum(item.count for item in greedy.completion.timing.passes) == rounds
    assert (rounds == 24) is not is_assisted
    first, again, other = [(await complete(1.0, seed)).token_ids for seed in (1, 1, 2)]
    assert first == again != other
    assert ("num_assistant_tokens_schedule=" in contender.note) is is_assisted


def test_the_gap_is_that_of_the_two_best_logits(tiny_target: Path) -> None:
    model = load_model(tiny_target)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([PROMPTS[0]])).logits[0, -1]
    best = logits.argsort(descending=True)[:2].tolist()
    gap, token_ids = top_two_gap(model, PROMPTS[0])
    assert list(token_ids) == best
    assert gap == pytest.approx(float(logits[best[0]] - logits[best[1]]), abs=1e-5)


def test_weights_are_in_float32_whatever_the_checkpoint_holds_and_have_to_be_there(
    tiny_target: Path, tmp_path: Path
) -> None:
    assert load_model(tiny_target).dtype is torch.float32
    with pytest.raises(BenchmarkError, match=str(tmp_path)):
        load_model(tmp_path)


def test_rows_and_ratios_are_medians_within_runs_and_other_tokens_are_counted() -> None:
    seconds = {"other": [1.0, 1.0, 1.0], OFF: [1.0, 0.5, 4.0], ON: [0.25, 0.5, 0.5]}
    samples = Samples(
        sample(name, wall_s, run=run, size=2, tokens=(1, 3 if name == "other" else 1))
        for name, times in seconds.items()
        for run, wall_s in enumerate(times)
    )
    rows = throughput_rows(samples, [Named(name) for name in seconds])
    assert [row["tokens_per_s"] for row in rows] == [4.0, 4.0, 8.0]
    assert (rows[1]["tokens_per_s_min"], rows[1]["tokens_per_s_max"]) == (1.0, 8.0)
    assert [(row["num_requests"], row[IDENTICAL]) for row in rows] == [(6, 0), (6, 6), (6, 6)]
    assert throughput_ratios(samples).values == {"off/other.x2": 1.0, "on/off.x2": 4.0}


@pytest.mark.parametrize("fixture", ["server", "corrupting_server"])
def test_throughput_writes_json_and_plot_and_prints_tables(
    fixture: str, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    serve_at(monkeypatch, request.getfixturevalue(fixture))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "def f(x):"}\n{"prompt": "class A:"}\n')
    arguments = [
        *("throughput", "--prompts", str(tmp_path / "prompts.jsonl"), "--target", str(tiny_target)),
        *("--drafter", f"small-lm={tiny_target}", "--out", str(tmp_path / "out"), "--max-tokens", "4"),
        *("--runs", "1", "--threads", "1", "--concurrency", "1,3"),
    ]
    result = CliRunner().invoke(bench.app, arguments)
    assert result.exit_code == (0 if fixture == "server" else 1), result.output
    report = json.loads((tmp_path / "out" / "throughput.json").read_text())
    assert len(report["rows"]) == 4 * 2
    assert "off/transformers-batched.x3" in report["ratios"]
    differ = [] if fixture == "server" else [f"coppice-on x{n}: {n} of {n} outputs differ" for n in (1, 3)]
    assert report["mismatches"] == differ
    assert lost_fields(report, "throughput.json") == set()
    assert (tmp_path / "out" / "throughput.png").is_file()
    assert "on/off" in result.output
