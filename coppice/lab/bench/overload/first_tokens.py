"""Where the slowest first tokens waited, by the server's own times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from coppice.completion import Timing
from coppice.lab.bench.load.window import Answer
from coppice.lab.bench.overload.figures import accepted
from coppice.lab.bench.overload.measure import OverloadSample

# So large a share of a load's requests, the slowest to their first token, is looked at one by one.
SHARE = 0.01
# What the time to a first token consists of, in order; `outside` is what the client saw and the server did not.
PARTS = ("door", "before_verifier", "verifier_queue", "other_passes", "first_pass", "outside")


def slowest(samples: Sequence[OverloadSample]) -> list[dict[str, Any]]:
    """One object for each of the slowest first tokens of a load, the slowest first; all of its samples are given.

    When they came says whether they had one cause: `at_s` is the intended arrival in its run.
    """
    found = [(answer, sample.run) for sample in samples for answer in accepted([sample]) if answer.ttft_s is not None]
    found.sort(key=lambda one: -(one[0].ttft_s or 0.0))
    return [
        {
            "name": f"x{samples[0].factor:g}",
            "run": run,
            "at_s": round(answer.intended_s, 3),
            "prompt_tokens": len(answer.request.task.prompt_ids),
            "ttft_ms": round(1000 * (answer.ttft_s or 0.0), 1),
            **{f"{part}_ms": round(value, 1) for part, value in parts(answer).items()},
        }
        for answer, run in found[: math.ceil(SHARE * len(found))]
    ]


def parts(answer: Answer) -> dict[str, float]:
    """PARTS of the time to an answer's first token, in milliseconds; together they are that time."""
    timing = answer.completion.timing if answer.completion is not None else Timing()
    return dict(
        zip(
            PARTS,
            (
                timing.door_ms,
                timing.ttft_ms - timing.queue_ms - timing.prompt_ms,
                timing.queue_ms - timing.door_ms,
                timing.prompt_ms - timing.first_pass_ms,
                timing.first_pass_ms,
                1000 * (answer.ttft_s or 0.0) - timing.ttft_ms,
            ),
            strict=True,
        )
    )
