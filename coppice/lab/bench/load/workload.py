"""The requests of a load: the same numbers give the same requests."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import dataclass

from coppice.lab.bench.client import Task

# Of the logarithm of a lognormal length.
SPREAD = 0.6
# Lengths that stand for all of them.
NUM_USUAL = 4096


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
    # Lengths around the geometric mean of the bounds and cut to them, instead of evenly drawn: many short, a few long.
    lognormal: bool = False

    def request(self, number: int, num_tokens: int | None = None) -> Task:
        """The request of a number; `num_tokens` replaces the drawn length, as far as outputs may be long."""
        prompt = number % len(self.prompts)
        if num_tokens is None:
            num_tokens = self._length(number)
        length = min(max(num_tokens, 1), self.max_tokens)
        return Task(self.prompts[prompt], length, self.temperature, self.seed + prompt, prompt=prompt)

    def longest(self, prompt: int) -> Task:
        """The request whose output begins with all others' of this prompt."""
        return self.request(prompt, self.max_tokens)

    @property
    def mean_tokens(self) -> float:
        """Expected length of an output."""
        if self.lognormal:
            return statistics.fmean(map(self._length, range(NUM_USUAL)))
        return (self.min_tokens + self.max_tokens) / 2

    def _length(self, number: int) -> int:
        rng = random.Random(f"{self.seed} {number}")
        if not self.lognormal:
            return rng.randint(self.min_tokens, self.max_tokens)
        return lognormal_length(rng, self.min_tokens, self.max_tokens)


def lognormal_length(rng: random.Random, shortest: int, longest: int) -> int:
    """A length within the bounds, the logarithm normal around the middle of theirs where it is not cut."""
    length = round(math.sqrt(shortest * longest) * rng.lognormvariate(0.0, SPREAD))
    return min(max(length, shortest), longest)
