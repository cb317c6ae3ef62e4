"""Figures of an overload benchmark, from its samples. Latencies are of attentive clients' completed requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from coppice.lab.bench.load.figures import percentile
from coppice.lab.bench.load.manner import ATTENTIVE
from coppice.lab.bench.load.window import Answer, Fate
from coppice.lab.bench.overload.measure import CALM, OverloadSample

# So many requests in a row as quick as those of the calm load are no luck, when they are among so many that come: a
# server with bounds refuses some in calm times, too.
NUM_QUICK = 5
NUM_LOOKED_AT = 10

# By name, what is measured of one answer, seconds.
LATENCIES: dict[str, Callable[[Answer], float | None]] = {
    "ttft": lambda answer: answer.ttft_s,
    "tpot": lambda answer: answer.tpot_s,
    "e2e": lambda answer: answer.e2e_s,
    "token": lambda answer: answer.e2e_s / len(answer.token_ids) if answer.token_ids else None,
}


def accepted(samples: Iterable[OverloadSample]) -> list[Answer]:
    """What came during the load and was completed, for clients that kept nobody waiting but themselves."""
    return [answer for answer in chain.from_iterable(sample.during for sample in samples) if _is_measured(answer)]


def latency(answers: Iterable[Answer], name: str, percent: float) -> float | None:
    """A percentile of one of LATENCIES, seconds; None of nothing."""
    values = (LATENCIES[name](answer) for answer in answers)
    return percentile([value for value in values if value is not None], percent)


def calm(samples: Iterable[OverloadSample]) -> list[OverloadSample]:
    """The samples of the load that all others are looked at beside."""
    return [sample for sample in samples if sample.factor == CALM]


def recovery_s(sample: OverloadSample, reference: Sequence[Answer]) -> float | None:
    """How long after the overload a request has to come to be served as in calm times.

    The first that gets in from which on NUM_QUICK in a row do, of NUM_LOOKED_AT that come at most, all with first
    tokens and a time per token within the reference's 99th percentiles. None where there are none.
    """
    limits = {name: latency(reference, name, 99) or 0.0 for name in ("ttft", "token")}

    def is_quick(answer: Answer) -> bool:
        values = {name: LATENCIES[name](answer) for name in limits}
        return all(value is not None and value <= limits[name] for name, value in values.items())

    came = [answer for answer in sample.after if answer.manner == ATTENTIVE]
    for number, first in enumerate(came):
        served = [one for one in came[number : number + NUM_LOOKED_AT] if one.fate is Fate.COMPLETED][:NUM_QUICK]
        if first.fate is Fate.COMPLETED and len(served) == NUM_QUICK and all(map(is_quick, served)):
            return first.intended_s - sample.end_s
    return None


def is_polite(answer: Answer) -> bool:
    """Whether a request that was refused was told when to come again."""
    return answer.retry_after_s is not None


def _is_measured(answer: Answer) -> bool:
    return answer.fate is Fate.COMPLETED and answer.manner == ATTENTIVE
