"""Answers, samples and contenders that are made up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coppice.completion import Completion, PassTiming, Speculation, Timing, Usage
from coppice.lab.bench.client import Answer, Batch, Delta, Fate, Task
from coppice.lab.bench.comparison import Sample
from coppice.lab.bench.counters import Counters

NOTHING = Counters()


@dataclass(frozen=True)
class Named:
    """A contender that is only looked at: asking it for a completion is a mistake of the test."""

    name: str
    note: str = "made up"

    async def complete(self, tasks: Sequence[Task]) -> Batch:
        raise AssertionError(f"{self.name} is only looked at")


def answer(
    deltas: Sequence[tuple[float, int]] = (),
    fate: Fate = Fate.COMPLETED,
    *,
    tokens: tuple[int, ...] | None = None,
    token: int = 7,
    intended_s: float = 0.0,
    ended_s: float | None = None,
    max_tokens: int | None = None,
    prompt: int = 0,
    temperature: float = 0.0,
    rounds: int | None = None,
    draft_tokens: int = 0,
    passes: Sequence[tuple[int, int]] = (),
    speculation: Speculation | None = None,
    timing: Timing | None = None,
    usage: Usage | None = None,
    counts_drafts: bool = True,
) -> Answer:
    """An answer of (time, tokens) deltas that ends with the last; `passes` are (rows, count)."""
    if tokens is None:
        tokens = (token,) * sum(count for _, count in deltas)
    counts = speculation or Speculation(len(deltas) if rounds is None else rounds, draft_tokens)
    timing = timing or Timing(passes=tuple(PassTiming(rows, count, 1.0) for rows, count in passes))
    completion = Completion("", 0, "", tokens, "length", None, usage or Usage(), counts, timing)
    return Answer(
        Task((1,), len(tokens) if max_tokens is None else max_tokens, temperature, 0, prompt=prompt),
        intended_s,
        intended_s,
        ended_s if ended_s is not None else deltas[-1][0] if deltas else intended_s,
        fate,
        tokens,
        tuple(Delta(at_s, count) for at_s, count in deltas),
        completion if fate is Fate.COMPLETED else None,
        "" if fate in (Fate.COMPLETED, Fate.CUT) else fate.value,
        counts_drafts=counts_drafts,
    )


def sample(
    contender: str,
    wall_s: float,
    *,
    run: int = 0,
    prompt: int = 0,
    temperature: float = 0.0,
    tokens: tuple[int, ...] = (1, 2, 3, 4),
    size: int = 1,
    speculation: Speculation | None = None,
    counted: Counters = NOTHING,
) -> Sample:
    """A batch of answers with the same tokens, which took so long, a quarter of it in the forward; two rounds."""
    answers = [
        answer(
            [(0.1, 1), (wall_s, len(tokens) - 1)],
            tokens=tokens,
            ended_s=wall_s,
            prompt=prompt + number,
            temperature=temperature,
            speculation=speculation,
            timing=Timing(forward_ms=250 * wall_s),
            counts_drafts=not contender.startswith("transformers"),
        )
        for number in range(size)
    ]
    return Sample(contender, temperature, run, Batch(tuple(answers), counted))
