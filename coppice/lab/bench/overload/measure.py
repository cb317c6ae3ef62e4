"""The overload benchmark: what saturates the server, then arrivals at shares and multiples of it, several runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from coppice.client import Client
from coppice.lab.bench.contenders import BenchmarkError
from coppice.lab.bench.load import figures
from coppice.lab.bench.load.loads import DRAIN_S, ClosedLoad
from coppice.lab.bench.load.loops import open_loop
from coppice.lab.bench.load.policies import PLANNER, Mode, Policy
from coppice.lab.bench.load.window import Answer, Fate, Window
from coppice.lab.bench.load.workload import Workload
from coppice.lab.bench.overload.crowd_watch import Crowd, CrowdWatch
from coppice.lab.bench.overload.visitors import Visitors, visits

# What the server itself chooses is what its users get.
POLICY = Policy(PLANNER, Mode.MODE_AUTO)
# The load beside which all others are looked at, as a share of saturation.
CALM = 0.7
# It lasts longer: its percentiles are in every ratio.
CALM_WINDOWS = 2


@dataclass(frozen=True, slots=True)
class OverloadPlan:
    """What is measured: `num_runs` times the calm load, then each of `factors` times saturation for `duration_s`.

    After each overload the calm load goes on for `recovery_s`.
    """

    factors: tuple[float, ...] = (1.0, 2.0, 4.0)
    num_runs: int = 2
    duration_s: float = 20.0
    recovery_s: float = 10.0
    # Requests at once that find out what saturates the server.
    concurrency: int = 32
    visitors: Visitors = field(default_factory=Visitors)


@dataclass(frozen=True, slots=True)
class OverloadSample:
    """One window: arrivals at `factor` times saturation until `end_s`, and calm ones after it."""

    factor: float
    run: int
    end_s: float
    answers: tuple[Answer, ...]
    crowds: tuple[Crowd, ...]

    @property
    def during(self) -> list[Answer]:
        """Of requests that were to be sent before the end."""
        return [answer for answer in self.answers if answer.intended_s < self.end_s]

    @property
    def after(self) -> list[Answer]:
        """Of those that came when it was over, in order."""
        return sorted(
            (answer for answer in self.answers if answer.intended_s >= self.end_s), key=lambda one: one.intended_s
        )


async def saturating_rate(client: Client, workload: Workload, plan: OverloadPlan) -> float:
    """Requests per second that the server does with so many at once.

    Raises:
        BenchmarkError: it did none.
    """
    window = Window(client, POLICY)
    span = await ClosedLoad(plan.concurrency, plan.duration_s).drive(window, workload, 0)
    rate_per_s = figures.tokens_per_s(window.answers(), span) / workload.mean_tokens
    if not rate_per_s:
        error = next((answer.error for answer in window.answers() if answer.error), f"within {plan.duration_s:g} s")
        raise BenchmarkError(f"no token came with {plan.concurrency} requests at once: {error}")
    return rate_per_s


async def measure_overload(
    client: Client,
    workload: Workload,
    plan: OverloadPlan,
    rate_per_s: float,
    watch: CrowdWatch,
    on_sample: Callable[[], None] = lambda: None,
) -> list[OverloadSample]:
    """Every load in every run, the calm one first; `rate_per_s` is what saturates the server.

    Raises:
        BenchmarkError: requests failed, and none was completed, or the metrics could not be had.
    """
    samples = []
    for run in range(plan.num_runs):
        for factor in (CALM, *plan.factors):
            samples.append(await _measure(client, workload, plan, rate_per_s, watch, factor, run))
            on_sample()
    return samples


async def _measure(
    client: Client,
    workload: Workload,
    plan: OverloadPlan,
    rate_per_s: float,
    watch: CrowdWatch,
    factor: float,
    run: int,
) -> OverloadSample:
    seed, visitors = f"{workload.seed} {factor:g} {run}", plan.visitors
    end_s = plan.duration_s * (CALM_WINDOWS if factor == CALM else 1)
    arrivals = visits(visitors, factor * rate_per_s, 0.0, end_s, seed)
    if factor != CALM:
        arrivals += visits(visitors, CALM * rate_per_s, end_s, plan.recovery_s, f"{seed} after")
    window = Window(client, POLICY)
    async with watch.watching() as crowds:
        await open_loop(window, workload, arrivals, DRAIN_S)
    answers = window.answers()
    fates = {answer.fate for answer in answers}
    if Fate.FAILED in fates and Fate.COMPLETED not in fates:
        error = next(answer.error for answer in answers if answer.fate is Fate.FAILED)
        raise BenchmarkError(f"x{factor:g}: no request was completed: {error}")
    return OverloadSample(factor, run, end_s, answers, tuple(crowds))
