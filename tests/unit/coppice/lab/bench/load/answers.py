"""Answers made by hand."""

from __future__ import annotations

from collections.abc import Sequence

from coppice.completion import Completion, PassTiming, Speculation, Timing, Usage
from coppice.lab.bench.contenders import Task
from coppice.lab.bench.load.window import Answer, Delta, Fate
from coppice.lab.bench.load.workload import LoadRequest


def answer(
    deltas: Sequence[tuple[float, int]],
    fate: Fate = Fate.COMPLETED,
    *,
    intended_s: float = 0.0,
    max_tokens: int | None = None,
    token: int = 7,
    rounds: int | None = None,
    draft_tokens: int = 0,
    passes: Sequence[tuple[int, int]] = (),
) -> Answer:
    """An answer of prompt 0 with (time, tokens) deltas that ends with the last; `passes` are (rows, count)."""
    num_tokens = sum(count for _, count in deltas)
    completion = Completion(
        request_id="",
        seed=0,
        text="",
        token_ids=(token,) * num_tokens,
        finish_reason="length",
        stop_match=None,
        usage=Usage(),
        speculation=Speculation(rounds=len(deltas) if rounds is None else rounds, draft_tokens=draft_tokens),
        timing=Timing(passes=tuple(PassTiming(rows, count, 1.0) for rows, count in passes)),
    )
    return Answer(
        request=LoadRequest(0, Task((1,), num_tokens if max_tokens is None else max_tokens, 0.0, 0)),
        intended_s=intended_s,
        sent_s=intended_s,
        ended_s=deltas[-1][0] if deltas else intended_s,
        fate=fate,
        token_ids=(token,) * num_tokens,
        deltas=tuple(Delta(at_s, count) for at_s, count in deltas),
        completion=completion if fate is Fate.COMPLETED else None,
        error="" if fate in (Fate.COMPLETED, Fate.CUT) else fate.value,
    )
