"""The measuring loop: order, warm-up and what it refuses."""

from __future__ import annotations

import pytest

from coppice.lab.bench.contenders import Completion, Task
from coppice.lab.bench.harness.experiment import BenchmarkError
from coppice.lab.bench.latency import Plan, measure
from coppice.lab.bench.prompts import fit_context


class Recorder:
    """A contender that notes who was called, and for what."""

    note = ""

    def __init__(self, name: str, calls: list[tuple[str, Task]], *, missing: int = 0) -> None:
        self.name = name
        self._calls = calls
        self._missing = missing

    def complete(self, task: Task) -> Completion:
        self._calls.append((self.name, task))
        return Completion((0,) * (task.max_tokens - self._missing), 1.0, 0.1, 1, 0.5)


def test_a_prompt_has_its_own_seed_and_keeps_it_over_runs() -> None:
    calls: list[tuple[str, Task]] = []
    measure([Recorder("a", calls)], [[1], [2]], Plan(2, 4, (0.0, 1.0), seed=7))
    seeds = {(task.prompt_ids, task.seed) for _, task in calls[4:]}
    assert seeds == {((1,), 7), ((2,), 8)}


def test_an_output_of_another_length_is_refused() -> None:
    short = Recorder("short", [], missing=1)
    with pytest.raises(BenchmarkError, match="short gave 3 tokens where 4 were asked for"):
        measure([short], [[1]], Plan(1, 4, (0.0,), seed=0))


def test_a_prompt_without_room_loses_its_beginning() -> None:
    assert fit_context([[1, 2, 3, 4], [5]], max_tokens=6, max_context_tokens=9) == ([[2, 3, 4], [5]], 1)


@pytest.mark.parametrize(("prompts", "max_tokens"), [([[1]], 9), ([[]], 1)])
def test_a_prompt_that_cannot_be_asked_is_refused(prompts: list[list[int]], max_tokens: int) -> None:
    with pytest.raises(BenchmarkError):
        fit_context(prompts, max_tokens, max_context_tokens=9)
