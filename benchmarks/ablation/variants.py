"""What is compared: groups of variants, each one way to draft. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.summary import ON
from coppice.cli.topology import DrafterSpec
from orchestrator.prefix_cache.guesses import SOURCE as CACHE

SEMI_AR = "semi-ar"
DIFFUSION = "diffusion"

SOURCES = "sources"
SHAPE = "shape"
COUPLING = "coupling"
CALIBRATION = "calibration"
MASKS = "masks"
GAMMA = "gamma"

# Trees of exactly as many nodes as are asked for, as far as a drafter can reach: no node is too unlikely.
FULL_TREES = (("DRAFT_MIN_PROBABILITY", "0"), ("DRAFT_MIN_GAIN", "0"))


@dataclass(frozen=True, slots=True)
class DrafterSetting:
    """A drafter process: its kind, its checkpoint and its environment."""

    spec: DrafterSpec
    settings: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to draft: the drafters behind an orchestrator, and those of them that requests name."""

    name: str
    drafters: tuple[DrafterSetting, ...]
    sources: tuple[str, ...]
    has_cache: bool = False
    # None leaves it to the server.
    max_nodes: int | None = None

    @property
    def contender(self) -> str:
        """The name of its contender, whose tokens must be those of speculation off."""
        return f"{ON} {self.name}"

    @property
    def asked(self) -> tuple[DrafterSetting, ...]:
        """Drafters that its requests are sent to."""
        return tuple(drafter for drafter in self.drafters if drafter.spec.kind in self.sources)


@dataclass(frozen=True, slots=True)
class Group:
    """Variants that take turns with each other and with speculation off."""

    name: str
    variants: tuple[Variant, ...]
    temperatures: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Grids:
    """Settings that are tried one after another: masks of semi-ar drafters, tokens of diffusion blocks."""

    masks: tuple[int, ...] = ()
    gammas: tuple[int, ...] = ()


def combined(sources: Iterable[str]) -> str:
    """The name of the variant that merges these sources."""
    return "+".join(sources)


def chain_name(kind: str) -> str:
    """The name of the variant that drafts chains."""
    return f"{kind} chain"


def tree_name(kind: str) -> str:
    """The name of the variant that drafts trees of as many nodes as its chains."""
    return f"{kind} tree"


def uncoupled_name(kind: str) -> str:
    """The name of the variant without the request's noise."""
    return f"{kind} uncoupled"


def uncalibrated_name(kind: str) -> str:
    """The name of the variant that sends its own probabilities."""
    return f"{kind} uncalibrated"


def make_groups(
    drafters: Sequence[DrafterSpec], temperatures: tuple[float, ...], num_nodes: int, grids: Grids
) -> tuple[Group, ...]:
    """Everything that these drafters, one of each kind, give to compare; groups without temperatures are left out."""
    plain = tuple(DrafterSetting(spec) for spec in drafters)
    hot = tuple(value for value in temperatures if value > 0)
    groups = [
        Group(SOURCES, tuple(_combinations(plain)), temperatures),
        Group(SHAPE, tuple(_shapes(drafters, num_nodes)), temperatures),
        Group(COUPLING, tuple(_switched(drafters, "COUPLING", uncoupled_name)), hot),
        Group(CALIBRATION, tuple(_switched(drafters, "ONLINE_CALIBRATION", uncalibrated_name)), temperatures),
        Group(MASKS, tuple(_grid(drafters, SEMI_AR, "SEMI_AR_MASKS", "k", grids.masks)), temperatures),
        Group(GAMMA, tuple(_grid(drafters, DIFFUSION, "DIFFUSION_BLOCK", "gamma", grids.gammas)), temperatures),
    ]
    return tuple(group for group in groups if group.variants and group.temperatures)


def combinations(kinds: Sequence[str]) -> list[tuple[str, ...]]:
    """Each kind and the cache alone, every pair, and all; the last one merges most."""
    names = (*kinds, CACHE)
    found = [*itertools.combinations(names, 1), *itertools.combinations(names, 2), names]
    return list(dict.fromkeys(found))


def _combinations(plain: tuple[DrafterSetting, ...]) -> Iterator[Variant]:
    for sources in combinations([one.spec.kind for one in plain]):
        yield Variant(combined(sources), plain, sources, has_cache=True)


def _shapes(drafters: Sequence[DrafterSpec], num_nodes: int) -> Iterator[Variant]:
    for spec in drafters:
        tree, chain = DrafterSetting(spec, FULL_TREES), DrafterSetting(spec, (*FULL_TREES, ("DRAFT_CHILDREN", "1")))
        yield Variant(tree_name(spec.kind), (tree,), (spec.kind,), max_nodes=num_nodes)
        yield Variant(chain_name(spec.kind), (chain,), (spec.kind,), max_nodes=num_nodes)


def _switched(drafters: Sequence[DrafterSpec], variable: str, name_without: Callable[[str], str]) -> Iterator[Variant]:
    for spec in drafters:
        yield Variant(spec.kind, (DrafterSetting(spec),), (spec.kind,))
        off = DrafterSetting(spec, ((variable, "off"),))
        yield Variant(name_without(spec.kind), (off,), (spec.kind,))


def _grid(
    drafters: Sequence[DrafterSpec], kind: str, variable: str, letter: str, values: Sequence[int]
) -> Iterator[Variant]:
    for spec in drafters:
        if spec.kind == kind:
            for value in values:
                setting = DrafterSetting(spec, ((variable, str(value)),))
                yield Variant(f"{kind} {letter}={value}", (setting,), (kind,))
