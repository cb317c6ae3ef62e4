"""The requests of a load: the same numbers give the same requests, whatever the policy."""

from __future__ import annotations

import random
from dataclasses import dataclass

from benchmarks.contenders import Task


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What to complete, and which prompt of the workload it is."""

    prompt: int
    task: Task


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts in turn, with output lengths drawn evenly from [min_tokens, max_tokens].

    A prompt always has the same seed, so that a shorter output is the beginning of a longer one.
    """

    prompts: tuple[tuple[int, ...], ...]
    min_tokens: int = 32
    max_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0

    def request(self, number: int, num_tokens: int | None = None) -> LoadRequest:
        """The request of a number; `num_tokens` replaces the drawn length, as far as outputs may be long."""
        prompt = number % len(self.prompts)
        if num_tokens is None:
            num_tokens = random.Random(f"{self.seed} {number}").randint(self.min_tokens, self.max_tokens)
        length = min(max(num_tokens, 1), self.max_tokens)
        return LoadRequest(prompt, Task(self.prompts[prompt], length, self.temperature, self.seed + prompt))

    def longest(self, prompt: int) -> LoadRequest:
        """The request whose output begins with all others' of this prompt."""
        return self.request(prompt, self.max_tokens)

    @property
    def mean_tokens(self) -> float:
        """Expected length of an output."""
        return (self.min_tokens + self.max_tokens) / 2
