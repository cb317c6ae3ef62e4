"""Many requests at once: transformers' batched and continuous batching, and our server, in turn on the same batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean

from coppice.lab.bench.client import OFF, ON, Contender, Mode, Policy, Server, connected, model_info
from coppice.lab.bench.comparison import (
    Plan,
    Sample,
    Setup,
    answers_of,
    differing,
    outputs,
    speed_ratios,
    take,
    tokens_per_s,
    warm_up,
)
from coppice.lab.bench.environment import describe_machine
from coppice.lab.bench.harness.experiment import Ratios, Samples, in_turn, progress, spread
from coppice.lab.bench.harness.plots import Panel
from coppice.lab.bench.harness.report import Report, Row, Shown, document, unequal
from coppice.lab.bench.harness.tables import Table
from coppice.lab.bench.transformers_baseline import BatchedGenerate, ContinuousBatching, load_model, quiet_transformers

MAX_WARM_UP_TOKENS = 8
IDENTICAL = f"num_identical_to_{OFF}"

SHOWN = Shown(
    tables=(
        Table("Tokens per second of so many requests at once", "tokens_per_s", "{contender}", across="concurrency"),
    ),
    panels=(Panel("Median of runs", "tokens_per_s", "concurrency", "{contender}", log_x=True),),
    line="{max_tokens} tokens each after {mean_prompt_tokens:.0f} on average, {num_runs} runs, {threads} threads, T=0; "
    "the time of prompts is in it.",
)


async def measure_batches(
    contenders: Sequence[Contender],
    prompts: Sequence[Sequence[int]],
    plan: Plan,
    size: int,
    runs: Iterable[int],
    on_requests: Callable[[], None] = lambda: None,
) -> Samples[Sample]:
    """So many greedy requests at once by every contender in turn, after a warm-up; runs begin at different prompts.

    Raises BenchmarkError if a contender failed or did not produce the length asked for.
    """
    taken: list[Sample] = []
    for run in runs:
        tasks = plan.tasks(prompts, range(run * size, (run + 1) * size), 0.0)
        if not taken:
            await warm_up(contenders, tasks, MAX_WARM_UP_TOKENS)
        for contender in in_turn(contenders, run):
            taken.append(await take(contender, tasks, run))
            on_requests()
    return Samples(taken)


async def measure_throughput(setup: Setup, concurrency: Sequence[int], address: str) -> Report:
    """The report of a target at every level of concurrency. Raises BenchmarkError if a contender failed."""
    machine, plan, threads = describe_machine(), setup.plan, setup.threads
    quiet_transformers()
    target = load_model(setup.target)
    async with contextlib.AsyncExitStack() as stack:
        client = await connected(stack, address)
        prompt_ids, num_cut = setup.encoded((await model_info(client)).max_context_tokens)
        longest = max(map(len, prompt_ids)) + plan.max_tokens
        contenders: list[Contender] = [
            BatchedGenerate(target, threads),
            ContinuousBatching(target, threads, longest),
            Server(client, Policy(OFF, Mode.MODE_OFF)),
            Server(client, Policy(ON, Mode.MODE_AUTO)),
        ]
        taken: list[Sample] = []
        with progress("throughput", len(contenders) * len(concurrency) * plan.num_runs) as advance:
            for size in concurrency:
                taken += await measure_batches(contenders, prompt_ids, plan, size, range(plan.num_runs), advance)
    samples = Samples(taken)
    rows = throughput_rows(samples, contenders)
    settings = {
        **setup.settings(prompt_ids, num_cut),
        "concurrency": list(concurrency),
        "mean_prompt_tokens": round(fmean(map(len, prompt_ids)), 1),
    }
    wrong = unequal([row for row in rows if row["contender"] == ON], "num_requests", IDENTICAL)
    return document("throughput", machine, settings, rows, throughput_ratios(samples), mismatches=wrong)


def throughput_rows(samples: Samples[Sample], contenders: Sequence[Contender]) -> list[Row]:
    """One flat object per contender and concurrency, in the order measured."""
    expected = outputs(samples)
    return [
        {
            "name": f"{contender.name} x{size}",
            "contender": contender.name,
            "concurrency": size,
            **spread("tokens_per_s", taken.by_run(tokens_per_s)),
            "num_requests": size * len(taken),
            IDENTICAL: size * len(taken) - len(differing(answers_of(taken), expected)),
            "note": contender.note,
        }
        for size in samples.each("size")
        for contender in contenders
        if (taken := samples.where(contender=contender.name, size=size))
    ]


def throughput_ratios(samples: Samples[Sample]) -> Ratios:
    """Ratios of tokens/s within a run, by concurrency: ours off over each baseline, and on over off."""
    pairs = [(name, OFF) if name == ON else (OFF, name) for name in samples.each("contender") if name != OFF]
    return Ratios.of(
        {
            f"{f'{one}/{other}'.replace('coppice-', '')}.x{size}": speed_ratios(
                samples.where(size=size), one, other, 0.0
            )
            for size in samples.each("size")
            for one, other in pairs
        }
    )
