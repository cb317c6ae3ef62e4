"""Variants are ways to decode, each a verifier, drafters and what requests ask for; groups of them take turns.

The services that groups need are started here, and groups are measured on them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from coppice.cli.topology import DrafterSpec, Topology
from coppice.core.denoising import LEFT_TO_DRAFTER, Denoising
from coppice.lab.bench import comparison
from coppice.lab.bench.client import (
    OFF,
    ON,
    AcceptanceRule,
    Contender,
    Meter,
    Mode,
    Policy,
    Server,
    connected,
    model_info,
)
from coppice.lab.bench.comparison import Sample, Setup
from coppice.lab.bench.counters import Counters
from coppice.lab.bench.figures import Figure, mean_acceptance_length
from coppice.lab.bench.harness.experiment import Samples, progress
from coppice.lab.bench.harness.report import Row
from coppice.lab.bench.services import Metered, start_metered

# Names and values of environment variables.
Settings = tuple[tuple[str, str], ...]

# Trees of exactly as many nodes as are asked for, as far as a drafter can reach: no node is too unlikely.
FULL_TREES: Settings = (("DRAFT_MIN_PROBABILITY", "0"), ("DRAFT_MIN_GAIN", "0"))


@dataclass(frozen=True, slots=True)
class DrafterSetting:
    """A drafter process: its kind, its checkpoint and its environment."""

    spec: DrafterSpec
    settings: Settings = ()

    def __str__(self) -> str:
        return " ".join(["drafter", self.spec.kind, *(f"{name}={value}" for name, value in self.settings)])


@dataclass(frozen=True, slots=True)
class VerifierSetting:
    """A verifier process: its environment."""

    settings: Settings = ()

    def __str__(self) -> str:
        return " ".join(["verifier", *(f"{name}={value}" for name, value in self.settings if "/" not in value)])


PLAIN = VerifierSetting()


@dataclass(frozen=True, slots=True)
class Front:
    """An orchestrator: what it is in front of, and its own settings."""

    verifier: VerifierSetting
    drafters: tuple[DrafterSetting, ...]
    has_cache: bool
    # Each round waits for its draft, so that trees do not depend on the machine.
    synchronous: bool
    # Most nodes of a round, 0 leaves them to it.
    max_nodes: int


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to decode: the drafters of an orchestrator, and those of them that requests are forced to use.

    Without `sources` they force nothing: the orchestrator plans who drafts, and whether any does.
    """

    name: str
    drafters: tuple[DrafterSetting, ...] = ()
    sources: tuple[str, ...] = ()
    verifier: VerifierSetting = PLAIN
    has_cache: bool = False
    synchronous: bool = False
    # Most nodes of a round: what requests ask for, and the orchestrator's own limit; without, they are left to it.
    max_nodes: int | None = None
    most_nodes: int = 0
    # Draws its trees and accepts by traversal, which keeps the law of the output and not its tokens.
    traversal: bool = False
    # Named by its requests, one drafter for all.
    denoising: Denoising = LEFT_TO_DRAFTER

    @property
    def contender(self) -> str:
        """The name of its contender, whose tokens must be those of speculation off."""
        return contender_name(self.name)

    @property
    def asked(self) -> tuple[DrafterSetting, ...]:
        """Drafters that its requests may be sent to."""
        return tuple(one for one in self.drafters if not self.sources or one.spec.kind in self.sources)

    @property
    def front(self) -> Front:
        return Front(self.verifier, self.drafters, self.has_cache, self.synchronous, self.most_nodes)

    @property
    def policy(self) -> Policy:
        forced = Mode.MODE_FORCED if self.sources else Mode.MODE_AUTO
        parts = (
            "" if self.verifier == PLAIN else str(self.verifier),
            f"sources {'+'.join(self.sources)}" if self.sources else "",
            " ".join(f"{name}={value}" for drafter in self.asked for name, value in drafter.settings),
            "" if self.denoising == LEFT_TO_DRAFTER else str(self.denoising),
            "traversal" if self.traversal else "",
            "synchronous rounds" if self.synchronous else "",
        )
        return Policy(
            self.contender,
            Mode.MODE_OFF if self.name == OFF else forced,
            self.max_nodes,
            self.sources,
            AcceptanceRule.ACCEPTANCE_RULE_TRAVERSAL if self.traversal else None,
            self.denoising,
            ", ".join(filter(None, parts)),
        )


# Speculation off.
PLAIN_DECODING = Variant(OFF)


def contender_name(variant: str) -> str:
    return OFF if variant == OFF else f"{ON} {variant}"


@dataclass(frozen=True, slots=True)
class Group:
    """Variants that take turns with each other and with speculation off, so many requests at once.

    Where prompts are known, what was computed for them before is used again: almost every pass then decodes.
    """

    name: str
    variants: tuple[Variant, ...]
    temperatures: tuple[float, ...]
    batch_size: int = 1
    knows_prompts: bool = False

    @property
    def everyone(self) -> tuple[Variant, ...]:
        return (PLAIN_DECODING, *self.variants)


def variants_of(groups: Iterable[Group]) -> list[Variant]:
    return list(dict.fromkeys(variant for group in groups for variant in group.everyone))


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
