"""The services that groups of variants need, and groups measured in turn on them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from coppice.cli.topology import Topology
from coppice.lab.bench import comparison
from coppice.lab.bench.ablation.variants import (
    DrafterSetting,
    Front,
    Group,
    Variant,
    VerifierSetting,
    contender_name,
    variants_of,
)
from coppice.lab.bench.client import Contender, Meter, Server, connected, model_info
from coppice.lab.bench.comparison import Sample, Setup
from coppice.lab.bench.counters import Counters
from coppice.lab.bench.figures import Figure, mean_acceptance_length
from coppice.lab.bench.harness.experiment import Samples, progress
from coppice.lab.bench.harness.report import Row
from coppice.lab.bench.services import Metered, start_metered


@dataclass(frozen=True, slots=True)
class Services:
    """A process for every setting of a verifier and of a drafter, and an orchestrator for every front.

    All run at once, so that all can take turns: a process without requests waits on a socket and costs memory.
    """

    fronts: Mapping[Front, str]
    verifiers: Mapping[VerifierSetting, Metered]
    drafters: Mapping[DrafterSetting, Metered]


async def start_services(topology: Topology, groups: Sequence[Group]) -> Services:
    """Start what the groups need, one after the other: each verifier and drafter compiles and warms up on its own."""
    variants = variants_of(groups)
    verifiers = {
        setting: await start_metered(partial(topology.add_verifier, str(setting)), dict(setting.settings))
        for setting in dict.fromkeys(variant.verifier for variant in variants)
    }
    drafters = {
        setting: await start_metered(partial(topology.add_drafter, str(setting), setting.spec), dict(setting.settings))
        for setting in dict.fromkeys(drafter for variant in variants for drafter in variant.drafters)
    }
    fronts: dict[Front, str] = {}
    for front in dict.fromkeys(variant.front for variant in variants):
        env = {
            "VERIFIER_ADDRESS": verifiers[front.verifier].address,
            "DRAFTER_ADDRESSES": ",".join(drafters[drafter].address for drafter in front.drafters),
            "CACHE_DRAFTER": "true" if front.has_cache else "false",
            "ROUNDS": "synchronous" if front.synchronous else "asynchronous",
            **({"MAX_NODES": str(front.max_nodes)} if front.max_nodes else {}),
        }
        fronts[front] = await topology.add_orchestrator(f"orchestrator {len(fronts) + 1}", env)
    return Services(fronts, verifiers, drafters)


@dataclass(frozen=True, slots=True)
class Measured:
    """A group and its samples. Contenders go by the names of variants."""

    group: Group
    samples: Samples[Sample]
    contenders: tuple[Contender, ...]

    @property
    def temperatures(self) -> list[float]:
        return self.samples.each("temperature")

    def of(self, variant: str, temperature: float) -> Samples[Sample]:
        return self.samples.where(contender=contender_name(variant), temperature=temperature)

    def by_run(self, variant: str, temperature: float, figure: Figure) -> list[float | None]:
        return comparison.by_run(self.samples, contender_name(variant), temperature, figure)

    def tau(self, variant: str, temperature: float) -> list[float | None]:
        """Tokens per round in each run."""
        return self.by_run(variant, temperature, mean_acceptance_length)

    def speed(self, variant: str, temperature: float) -> list[float | None]:
        """Tokens per second in each run."""
        return comparison.speeds(self.samples, contender_name(variant), temperature)

    def counted(self, contender: str, temperature: float | None = None) -> Counters:
        """What a contender's services counted, at one temperature or at all of them."""
        chosen = self.samples.where(contender=contender)
        return counted_of(one for one in chosen if temperature in (None, one.temperature))

    def rows(self) -> list[Row]:
        """A row per variant and temperature; names are unique with the group's in front."""
        found = comparison.rows(self.samples, self.contenders)
        for row in found:
            # A third of a row of the latency benchmark, whose business it is.
            del row["ms_per_pass_by_rows"]
            row |= {"name": f"{self.group.name}: {row['name']}", "group": self.group.name}
        return found


def counted_of(samples: Iterable[Sample]) -> Counters:
    """What services counted during some batches, added up."""
    total = Counters()
    for sample in samples:
        total = total.plus(sample.batch.counted)
    return total


def batches_of(num_prompts: int, size: int) -> list[range]:
    """Numbers of the requests of each batch: as many as there are prompts, and at least one full batch."""
    return [range(size * at, size * (at + 1)) for at in range(max(1, num_prompts // size))]


def num_requests(groups: Iterable[Group], num_prompts: int, num_runs: int) -> int:
    """Completions that are measured, those of plain decoding included."""
    return num_runs * sum(
        len(group.everyone) * len(group.temperatures) * sum(map(len, batches_of(num_prompts, group.batch_size)))
        for group in groups
    )


async def measure_groups(
    label: str,
    services: Services,
    groups: Sequence[Group],
    setup: Setup,
    num_prompts: int,
    meter: Callable[[Variant], Meter],
) -> tuple[list[Measured], Row]:
    """Every group on `num_prompts` prompts, or on a full batch of them if that is more; also settings for the report.

    Raises BenchmarkError if a completion failed or had another length, or a service's metrics were not there.
    """
    async with contextlib.AsyncExitStack() as stack:
        clients = {front: await connected(stack, address) for front, address in services.fronts.items()}
        info = await model_info(clients[groups[0].everyone[0].front])
        prompt_ids, num_cut = setup.encoded(info.max_context_tokens)
        measured = []
        with progress(label, num_requests(groups, num_prompts, setup.plan.num_runs)) as advance:
            for group in groups:
                salt = "known" if group.knows_prompts else ""
                contenders = tuple(
                    Server(clients[one.front], one.policy, meter(one), salt=salt) for one in group.everyone
                )
                samples = await comparison.measure(
                    contenders,
                    prompt_ids,
                    replace(setup.plan, temperatures=group.temperatures),
                    batches_of(num_prompts, group.batch_size),
                    advance,
                    meet_all=group.knows_prompts,
                )
                measured.append(Measured(group, samples, contenders))
    return measured, setup.settings(prompt_ids, num_cut)
