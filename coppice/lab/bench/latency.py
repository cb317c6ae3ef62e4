"""The latency benchmark: one stream, every contender on every prompt in turn, several runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coppice.lab.bench.contenders import BenchmarkError, Completion, Contender, Task

# Enough for lazy initialisation, thread pools and the first allocations to be over.
NUM_WARM_UP_PROMPTS = 2
MAX_WARM_UP_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured."""

    num_runs: int
    max_tokens: int
    temperatures: tuple[float, ...]
    seed: int
    # Of our own server's requests; transformers is not asked for any.
    repetition_penalty: float = 1.0

    def task(self, prompt_ids: Sequence[int], prompt: int, temperature: float) -> Task:
        """The same task in every run, so that runs differ by the machine's noise alone."""
        return Task(tuple(prompt_ids), self.max_tokens, temperature, self.seed + prompt, self.repetition_penalty)


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion within the benchmark; `prompt` is its index."""

    contender: str
    temperature: float
    run: int
    prompt: int
    completion: Completion


def measure(
    contenders: Sequence[Contender],
    prompts: Sequence[Sequence[int]],
    plan: Plan,
    on_sample: Callable[[], None] = lambda: None,
) -> list[Sample]:
    """Complete every prompt with every contender in turn, `num_runs` times at every temperature.

    Only one contender works at a time. Who begins rotates, so that nobody always runs on the caches or the
    clock rate that the same predecessor left behind.

    Raises:
        BenchmarkError: a contender failed or did not produce the length asked for.
    """
    _warm_up(contenders, prompts, plan)
    samples = []
    for run in range(plan.num_runs):
        for temperature in plan.temperatures:
            for prompt, prompt_ids in enumerate(prompts):
                task = plan.task(prompt_ids, prompt, temperature)
                for contender in _rotated(contenders, run + prompt):
                    completion = contender.complete(task)
                    _check_length(contender, completion, task)
                    samples.append(Sample(contender.name, temperature, run, prompt, completion))
                    on_sample()
    return samples


def fit_context(
    prompts: Sequence[Sequence[int]], max_tokens: int, max_context_tokens: int
) -> tuple[list[list[int]], int]:
    """Prompts that leave room for the output, too long ones without their beginning, and how many were cut.

    Raises:
        BenchmarkError: the output alone fills the context, or a prompt has no token.
    """
    room = max_context_tokens - max_tokens
    if room < 1:
        raise BenchmarkError(
            f"--max-tokens {max_tokens} leaves no room for a prompt in a context of {max_context_tokens}"
        )
    for number, prompt in enumerate(prompts, 1):
        if not prompt:
            raise BenchmarkError(f"prompt {number} has no token")
    return [list(prompt[-room:]) for prompt in prompts], sum(len(prompt) > room for prompt in prompts)


def _warm_up(contenders: Sequence[Contender], prompts: Sequence[Sequence[int]], plan: Plan) -> None:
    num_tokens = min(plan.max_tokens, MAX_WARM_UP_TOKENS)
    for temperature in plan.temperatures:
        for prompt_ids in prompts[:NUM_WARM_UP_PROMPTS]:
            for contender in contenders:
                contender.complete(Task(tuple(prompt_ids), num_tokens, temperature, plan.seed))


def _rotated(contenders: Sequence[Contender], shift: int) -> list[Contender]:
    shift %= len(contenders)
    return [*contenders[shift:], *contenders[:shift]]


def _check_length(contender: Contender, completion: Completion, task: Task) -> None:
    if len(completion.token_ids) != task.max_tokens:
        raise BenchmarkError(
            f"{contender.name} gave {len(completion.token_ids)} tokens where {task.max_tokens} were asked for"
        )
