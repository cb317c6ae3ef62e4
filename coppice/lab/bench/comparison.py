"""Contenders in turn on the same tasks: what latency, throughput and the ablations have in common.

A task has the same output from every contender: every output of ours is compared with what speculation off said to it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from coppice.lab.bench import figures
from coppice.lab.bench.client import OFF, ON, TRANSFORMERS, Answer, Batch, Contender, Fate, Task
from coppice.lab.bench.figures import LOOPING_SHARE, Figure
from coppice.lab.bench.harness.experiment import BenchmarkError, Experiment, Samples, over, quotient, rounded, spread
from coppice.lab.bench.harness.report import Row, shown_path
from coppice.lab.bench.prompts import Prompt, encoded_prompts

# Enough for lazy initialisation, thread pools and the first allocations to be over.
NUM_WARM_UP_BATCHES = 2
MAX_WARM_UP_TOKENS = 32
# With speculation on, fewer rounds with a draft than this measure something else.
MIN_DRAFTED_SHARE = 0.8

# Token ids by task.
Outputs: TypeAlias = Mapping[Task, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Plan:
    """Runs, tokens and temperatures of a benchmark of single streams or of batches."""

    num_runs: int
    max_tokens: int
    temperatures: tuple[float, ...]
    seed: int
    # Of our own server's requests; transformers is not asked for any.
    repetition_penalty: float = 1.0

    def tasks(self, prompts: Sequence[Sequence[int]], batch: Iterable[int], temperature: float) -> list[Task]:
        """The same in every run, so that runs differ by the machine's noise alone; prompts come again if need be."""
        return [
            Task(
                tuple(prompts[number % len(prompts)]),
                self.max_tokens,
                temperature,
                self.seed + number,
                self.repetition_penalty,
                number,
            )
            for number in batch
        ]


@dataclass(frozen=True, slots=True)
class Setup:
    """A target, prompts and a plan."""

    target: Path
    prompts: tuple[Prompt, ...]
    plan: Plan
    # Of each model, save that the drafter takes one by itself unless --threads names a number.
    threads: int

    def encoded(self, max_context_tokens: int) -> tuple[list[list[int]], int]:
        """The prompts in the target's tokens, and how many lost their beginning, for which there is no room.

        Raises BenchmarkError if the output alone fills the context, or a prompt has no token.
        """
        return encoded_prompts(self.target, self.prompts, self.plan.max_tokens, max_context_tokens)

    def settings(self, prompt_ids: Sequence[Sequence[int]], num_cut: int) -> Row:
        origins = zip(self.prompts, prompt_ids, strict=True)
        return {
            "target": shown_path(self.target),
            "threads": self.threads,
            "num_runs": self.plan.num_runs,
            "max_tokens": self.plan.max_tokens,
            "temperatures": list(self.plan.temperatures),
            "seed": self.plan.seed,
            "repetition_penalty": self.plan.repetition_penalty,
            "prompts": [{"origin": prompt.origin, "tokens": len(ids)} for prompt, ids in origins],
            "num_prompts": len(self.prompts),
            "num_cut_prompts": num_cut,
        }


@dataclass(frozen=True, slots=True)
class Sample:
    """One batch within a benchmark, which may be of one task."""

    contender: str
    temperature: float
    run: int
    batch: Batch

    @property
    def answers(self) -> tuple[Answer, ...]:
        return self.batch.answers

    @property
    def size(self) -> int:
        return len(self.answers)


async def measure(
    contenders: Sequence[Contender],
    prompts: Sequence[Sequence[int]],
    plan: Plan,
    batches: Sequence[Sequence[int]],
    on_requests: Callable[[int], None] = lambda count: None,
    *,
    meet_all: bool = False,
) -> Samples[Sample]:
    """Every batch of task numbers by every contender in turn, `num_runs` times at every temperature.

    Before, all complete the first batches, or with `meet_all` every batch, so that its prompts are known. Raises
    BenchmarkError if a contender failed, or did not produce the length asked for.
    """
    for temperature in plan.temperatures:
        knows = meet_all and temperature == plan.temperatures[0]
        for batch in batches if knows else batches[:NUM_WARM_UP_BATCHES]:
            await warm_up(contenders, plan.tasks(prompts, batch, temperature))
    loads = [(temperature, batch) for temperature in plan.temperatures for batch in batches]
    taken = []
    for turn in Experiment(contenders, loads, plan.num_runs).turns():
        temperature, batch = turn.load
        taken.append(await take(turn.arm, plan.tasks(prompts, batch, temperature), turn.run))
        on_requests(len(batch))
    return Samples(taken)


async def warm_up(contenders: Iterable[Contender], tasks: Sequence[Task], most: int = MAX_WARM_UP_TOKENS) -> None:
    """Let each begin such tasks once, `most` tokens of each."""
    short = [replace(task, max_tokens=min(task.max_tokens, most)) for task in tasks]
    for contender in contenders:
        await contender.complete(short)


async def take(contender: Contender, tasks: Sequence[Task], run: int) -> Sample:
    """One batch. Raises BenchmarkError if the contender failed, or did not produce the length asked for."""
    batch = await contender.complete(tasks)
    for answer in batch.answers:
        if (given := len(answer.token_ids)) != answer.task.max_tokens:
            raise BenchmarkError(f"{contender.name} gave {given} tokens where {answer.task.max_tokens} were asked for")
    return Sample(contender.name, tasks[0].temperature, run, batch)


def answers_of(samples: Iterable[Sample]) -> list[Answer]:
    return [answer for sample in samples for answer in sample.answers]


def tokens_per_s(samples: Iterable[Sample]) -> float | None:
    """All tokens over the time of all batches, each until its last request was done, prompts included."""
    chosen = list(samples)
    return quotient(figures.num_tokens(answers_of(chosen)), sum(sample.batch.wall_s for sample in chosen))


def speeds(samples: Samples[Sample], contender: str, temperature: float) -> list[float | None]:
    """A contender's tokens/s in each run; empty where it did not take part."""
    return samples.where(contender=contender, temperature=temperature).by_run(tokens_per_s)


def by_run(samples: Samples[Sample], contender: str, temperature: float, figure: Figure) -> list[float | None]:
    """A figure of a contender's answers in each run; empty where it did not take part."""
    chosen = samples.where(contender=contender, temperature=temperature)
    return chosen.by_run(lambda run: figure(answers_of(run)))


def speed_ratios(samples: Samples[Sample], first: str, second: str, temperature: float) -> list[float]:
    """The ratio of two contenders' tokens/s in each run; empty where one did not take part."""
    return over(*(speeds(samples, name, temperature) for name in (first, second)))


def outputs(samples: Iterable[Sample], contender: str = OFF) -> dict[Task, tuple[int, ...]]:
    """What a contender said first to each task."""
    found: dict[Task, tuple[int, ...]] = {}
    for sample in samples:
        for answer in sample.answers if sample.contender == contender else ():
            found.setdefault(answer.task, answer.token_ids)
    return found


def is_identical(answer: Answer, expected: tuple[int, ...]) -> bool:
    """Whether an answer is what is expected; of a request that was not completed, its beginning."""
    return answer.token_ids == (expected if answer.fate is Fate.COMPLETED else expected[: len(answer.token_ids)])


def differing(answers: Iterable[Answer], expected: Outputs) -> list[Answer]:
    """Those that are not what is expected of their tasks."""
    return [answer for answer in answers if answer.token_ids != expected.get(answer.task)]


def mismatches(samples: Sequence[Sample], drawing: Collection[str] = ()) -> list[str]:
    """Every output of ours that is not what speculation off said to the task first, but for contenders that draw."""
    expected = outputs(samples)
    return [
        f"{sample.contender} differs from {OFF} at T={sample.temperature:g} on prompt {answer.task.prompt + 1} "
        f"(run {sample.run + 1})"
        for sample in samples
        if sample.contender.startswith((OFF, ON)) and sample.contender not in drawing
        for answer in differing(sample.answers, expected)
    ]


def rows(samples: Samples[Sample], contenders: Sequence[Contender]) -> list[Row]:
    return [row(samples, one, temperature) for temperature in samples.each("temperature") for one in contenders]


def row(samples: Samples[Sample], contender: Contender, temperature: float) -> Row:
    """Speed, acceptance and identity of a contender at a temperature."""
    group = samples.where(contender=contender.name, temperature=temperature)
    answers = answers_of(group)
    return {
        "name": f"{contender.name} T={temperature:g}",
        "contender": contender.name,
        "temperature": temperature,
        **spread("tokens_per_s", group.by_run(tokens_per_s)),
        "speed_over_off": spread("over", speed_ratios(samples, contender.name, OFF, temperature), 4)["over"],
        "mean_acceptance_length": rounded(figures.mean_acceptance_length(answers), 4),
        "drafted_share": rounded(figures.drafted_share(answers), 4),
        "acceptance_by_depth": [round(share, 4) for share in figures.acceptance_by_depth(answers)],
        **{name: round(figure(answers), 4) for name, figure in figures.SHARES.items()},
        "ttft_ms": rounded(1000 * (figures.median_ttft_s(answers) or 0.0)),
        "repeated_4grams": round(figures.repeated_4grams(answers), 4),
        **_identity(samples, contender.name, temperature, answers),
        "ms_per_pass_by_rows": figures.ms_per_pass_by_rows(answers),
        "rounds": figures.num_rounds(answers),
        "tokens": figures.num_tokens(answers),
        **figures.draft_counts(answers),
        "note": contender.note,
    }


def _identity(samples: Samples[Sample], contender: str, temperature: float, answers: Sequence[Answer]) -> Row:
    """Whom a contender must agree with, and on how many prompts it does (in every run).

    With speculation on we must repeat what we gave with it off. Under greedy decoding all should agree with plain
    `generate`; under sampling they cannot, because the random numbers differ.
    """
    by_generate = outputs(samples.where(temperature=0.0), TRANSFORMERS) if temperature == 0 else {}
    is_plain = not by_generate or contender == TRANSFORMERS
    reference = OFF if contender.startswith(ON) else None if is_plain else TRANSFORMERS
    prompts = {answer.task.prompt for answer in answers}

    def num_same(expected: Outputs) -> int:
        return len(prompts - {answer.task.prompt for answer in differing(answers, expected)})

    same = None if reference is None else num_same(outputs(samples, reference))
    return {
        "num_prompts": len(prompts),
        "identical": None if same is None else same == len(prompts),
        "identical_to": reference,
        "num_identical": same,
        "num_identical_to_transformers": num_same(by_generate) if by_generate else None,
    }


def remarks(found: Sequence[Row]) -> list[str]:
    """Warnings about outputs that repeat themselves, and about speculation that hardly drafted."""
    notes = []
    if looping := [one for one in found if one["repeated_4grams"] >= LOOPING_SHARE]:
        worst = max(looping, key=lambda one: one["repeated_4grams"])
        temperatures = sorted({f"{one['temperature']:g}" for one in looping})
        notes.append(
            f"Outputs at T={' and T='.join(temperatures)} loop: up to {worst['repeated_4grams']:.0%} of their 4-grams "
            f"occurred before in the same output ({worst['name']}). Repetition is easy to draft, so the speed-up there "
            "flatters speculation; compare it with the figures of a temperature without loops."
        )
    return notes + [
        f"{one['name']} had a draft in only {one['drafted_share']:.0%} of its rounds: this is mostly plain decoding."
        for one in found
        if one["contender"].startswith(ON) and (one["drafted_share"] or 0) < MIN_DRAFTED_SHARE
    ]


def short_name(one: Mapping[str, Any]) -> str:
    """A contender without what all variants are called."""
    return str(one["contender"]).removeprefix(f"{ON} ")
