"""The measurement: group by group, every variant and speculation off in turn on every prompt."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import grpc

from coppice.core.denoising import LEFT_TO_DRAFTER
from coppice.lab.bench.ablation.meters import MeteredContender, Reading
from coppice.lab.bench.ablation.services import Services
from coppice.lab.bench.ablation.variants import Group
from coppice.lab.bench.contenders import Contender
from coppice.lab.bench.coppice_contender import AcceptanceRule, CoppiceContender, Mode
from coppice.lab.bench.latency import Plan, measure
from coppice.lab.bench.summary import OFF, Samples


@dataclass(frozen=True, slots=True)
class Measured:
    """What became of a group: everybody's samples, and what the drafters of each variant counted."""

    group: Group
    samples: Samples
    contenders: tuple[Contender, ...]
    # By contender and temperature.
    readings: dict[tuple[str, float], Reading]

    @property
    def drawing(self) -> frozenset[str]:
        """Contenders whose tokens follow the target's law and need not be those of speculation off."""
        return frozenset(variant.contender for variant in self.group.variants if variant.traversal)

    def reading(self, contender: str, temperature: float) -> Reading:
        """What a contender's drafters counted; nothing for plain decoding."""
        return self.readings.get((contender, temperature), Reading())

    def readings_of(self, contender: str) -> Reading:
        """What a contender's drafters counted at all temperatures."""
        total = Reading()
        for temperature in self.group.temperatures:
            total = total.plus(self.reading(contender, temperature))
        return total


def num_samples(groups: Sequence[Group], num_prompts: int, plan: Plan) -> int:
    """Completions that are measured, those of speculation off included."""
    return sum((1 + len(group.variants)) * num_prompts * len(group.temperatures) * plan.num_runs for group in groups)


def measure_groups(
    services: Services,
    groups: Sequence[Group],
    prompt_ids: Sequence[Sequence[int]],
    plan: Plan,
    on_sample: Callable[[], None] = lambda: None,
) -> list[Measured]:
    """Measure one group after another.

    Raises:
        BenchmarkError: a completion failed or did not have the length asked for, or a drafter's metrics were not there.
    """
    return [_measure_group(services, group, prompt_ids, plan, on_sample) for group in groups]


def _measure_group(
    services: Services,
    group: Group,
    prompt_ids: Sequence[Sequence[int]],
    plan: Plan,
    on_sample: Callable[[], None],
) -> Measured:
    with contextlib.ExitStack() as channels:
        plain = channels.enter_context(grpc.insecure_channel(services.plain))
        metered = []
        for variant in group.variants:
            channel = channels.enter_context(grpc.insecure_channel(services.address(variant)))
            settings = " ".join(f"{name}={value}" for drafter in variant.asked for name, value in drafter.settings)
            law = "traversal" if variant.traversal else ""
            asked = "" if variant.denoising == LEFT_TO_DRAFTER else str(variant.denoising)
            named = f"sources {'+'.join(variant.sources)}" if variant.sources else ""
            note = ", ".join(filter(None, (named, settings, asked, law)))
            rule = AcceptanceRule.ACCEPTANCE_RULE_TRAVERSAL if variant.traversal else None
            drafting = CoppiceContender(
                variant.contender,
                channel,
                Mode.MODE_FORCED if variant.sources else Mode.MODE_AUTO,
                setting=note,
                sources=variant.sources,
                acceptance=rule,
                denoising=variant.denoising,
            )
            metered.append(MeteredContender(drafting, services.metrics_urls(variant)))
        contenders: tuple[Contender, ...] = (CoppiceContender(OFF, plain, Mode.MODE_OFF), *metered)
        own = replace(plan, temperatures=group.temperatures)
        samples = measure(contenders, prompt_ids, own, on_sample)
    num_each = len(prompt_ids) * len(group.temperatures) * plan.num_runs
    readings = {
        (one.name, temperature): one.last(num_each, temperature)
        for one in metered
        for temperature in group.temperatures
    }
    return Measured(group, Samples(samples), contenders, readings)
