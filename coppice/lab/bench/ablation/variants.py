"""What is compared: groups of variants, each one way to draft. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from coppice.cli.topology import DrafterSpec
from coppice.core.denoising import LEFT_TO_DRAFTER, MAX_DENOISING_STEPS, Denoising
from coppice.lab.bench.contenders import ON
from drafter_svc.drafters.kinds import SMALL_LMS
from orchestrator.prefix_cache.guesses import SOURCE as CACHE

SEMI_AR = "semi-ar"
DIFFUSION = "diffusion"

SOURCES = "sources"
SHAPE = "shape"
COUPLING = "coupling"
ACCEPTANCE = "acceptance"
CALIBRATION = "calibration"
MASKS = "masks"
GAMMA = "gamma"
AHEAD = "ahead"
CONTEXT = "context"

# Everything that is compared, in order.
PARTS = (SOURCES, SHAPE, COUPLING, ACCEPTANCE, CALIBRATION, MASKS, GAMMA, AHEAD, CONTEXT)

# The variant that leaves everything to the orchestrator.
PLANNER = "planner"

# Trees of exactly as many nodes as are asked for, as far as a drafter can reach: no node is too unlikely.
FULL_TREES = (("DRAFT_MIN_PROBABILITY", "0"), ("DRAFT_MIN_GAIN", "0"))


@dataclass(frozen=True, slots=True)
class DrafterSetting:
    """A drafter process: its kind, its checkpoint and its environment."""

    spec: DrafterSpec
    settings: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to draft: the drafters behind an orchestrator, and those of them that requests are forced to use.

    Without `sources` they force nothing: the orchestrator plans who drafts, and whether anybody does.
    """

    name: str
    drafters: tuple[DrafterSetting, ...]
    sources: tuple[str, ...]
    has_cache: bool = False
    # Draws its trees and accepts by traversal, which keeps the law of the output and not its tokens.
    traversal: bool = False
    # Named by its requests, one drafter for all.
    denoising: Denoising = LEFT_TO_DRAFTER

    @property
    def contender(self) -> str:
        """The name of its contender, whose tokens must be those of speculation off."""
        return f"{ON} {self.name}"

    @property
    def asked(self) -> tuple[DrafterSetting, ...]:
        """Drafters that its requests may be sent to."""
        return tuple(one for one in self.drafters if not self.sources or one.spec.kind in self.sources)


@dataclass(frozen=True, slots=True)
class Group:
    """Variants that take turns with each other and with speculation off."""

    name: str
    variants: tuple[Variant, ...]
    temperatures: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Grids:
    """Settings that are tried one after another.

    `masks` are those of semi-ar drafters; `gammas` are tokens of diffusion blocks, each with all `denoising` steps;
    `ahead` are the most steps of a round that a small LM takes behind likely outcomes, the more of them, the wider;
    `contexts` the most tokens of a sequence that are read.
    """

    masks: tuple[int, ...] = ()
    gammas: tuple[int, ...] = ()
    denoising: tuple[int, ...] = (1,)
    ahead: tuple[int, ...] = ()
    contexts: tuple[int, ...] = ()


def combined(sources: Iterable[str]) -> str:
    """The name of the variant that merges these sources."""
    return "+".join(sources)


def chain_name(kind: str) -> str:
    """The name of the variant that drafts chains."""
    return f"{kind} chain"


def tree_name(kind: str) -> str:
    """The name of the variant that drafts trees of as many nodes as its chains."""
    return f"{kind} tree"


def traversal_name(kind: str) -> str:
    """The name of the variant whose trees are drawn."""
    return f"{kind} traversal"


def ahead_name(kind: str, steps: int) -> str:
    """The name of the variant that drafts ahead with so many steps."""
    return f"{kind} ahead={steps}"


def uncoupled_name(kind: str) -> str:
    """The name of the variant without the request's noise."""
    return f"{kind} uncoupled"


def uncalibrated_name(kind: str) -> str:
    """The name of the variant that sends its own probabilities."""
    return f"{kind} uncalibrated"


def make_groups(
    drafters: Sequence[DrafterSpec],
    temperatures: tuple[float, ...],
    num_nodes: int,
    grids: Grids,
    parts: Collection[str] = PARTS,
    has_planner: bool = True,
) -> tuple[Group, ...]:
    """Those `parts` that these drafters, one of each kind, give to compare; none without temperatures.

    Rounds have at most `num_nodes` nodes. Synchronous ones have no planner: all of them are drafted for by all.
    """
    plain = tuple(DrafterSetting(spec) for spec in drafters)
    hot = tuple(value for value in temperatures if value > 0)
    groups = [
        Group(SOURCES, tuple(_combinations(plain, has_planner)), temperatures),
        Group(SHAPE, tuple(_shapes(drafters, num_nodes)), temperatures),
        Group(COUPLING, tuple(_switched(drafters, "COUPLING", uncoupled_name)), hot),
        Group(ACCEPTANCE, tuple(_acceptance(drafters)), hot),
        Group(CALIBRATION, tuple(_switched(drafters, "ONLINE_CALIBRATION", uncalibrated_name)), temperatures),
        Group(MASKS, tuple(_masks(drafters, grids.masks)), temperatures),
        Group(GAMMA, tuple(_gammas(drafters, grids)), temperatures),
        Group(AHEAD, tuple(_ahead(drafters, grids.ahead)), temperatures),
        Group(CONTEXT, tuple(_contexts(drafters, grids.contexts)), temperatures),
    ]
    return tuple(group for group in groups if group.name in parts and group.variants and group.temperatures)


def combinations(kinds: Sequence[str]) -> list[tuple[str, ...]]:
    """Each kind and the cache alone, every pair, and all; the last one merges most."""
    names = (*kinds, CACHE)
    found = [*itertools.combinations(names, 1), *itertools.combinations(names, 2), names]
    return list(dict.fromkeys(found))


def _combinations(plain: tuple[DrafterSetting, ...], has_planner: bool) -> Iterator[Variant]:
    for sources in combinations([one.spec.kind for one in plain]):
        yield Variant(combined(sources), plain, sources, has_cache=True)
    if has_planner:
        yield Variant(PLANNER, plain, (), has_cache=True)


def _shapes(drafters: Sequence[DrafterSpec], num_nodes: int) -> Iterator[Variant]:
    for spec in drafters:
        # As deep as a chain of all nodes, where a drafter can.
        deep = (*FULL_TREES, ("DRAFT_STEPS", str(num_nodes)))
        tree, chain = DrafterSetting(spec, deep), DrafterSetting(spec, (*deep, ("DRAFT_CHILDREN", "1")))
        yield Variant(tree_name(spec.kind), (tree,), (spec.kind,))
        yield Variant(chain_name(spec.kind), (chain,), (spec.kind,))


def _switched(drafters: Sequence[DrafterSpec], variable: str, name_without: Callable[[str], str]) -> Iterator[Variant]:
    for spec in drafters:
        yield Variant(spec.kind, (DrafterSetting(spec),), (spec.kind,))
        off = DrafterSetting(spec, ((variable, "off"),))
        yield Variant(name_without(spec.kind), (off,), (spec.kind,))


def _acceptance(drafters: Sequence[DrafterSpec]) -> Iterator[Variant]:
    for spec in drafters:
        if spec.kind in SMALL_LMS:
            tree = DrafterSetting(spec, FULL_TREES)
            yield Variant(tree_name(spec.kind), (tree,), (spec.kind,))
            yield Variant(traversal_name(spec.kind), (tree,), (spec.kind,), traversal=True)


def _masks(drafters: Sequence[DrafterSpec], values: Sequence[int]) -> Iterator[Variant]:
    for spec in drafters:
        if spec.kind == SEMI_AR:
            for value in values:
                yield _set(spec, f"{SEMI_AR} k={value}", ("SEMI_AR_MASKS", str(value)))


def _gammas(drafters: Sequence[DrafterSpec], grids: Grids) -> Iterator[Variant]:
    for spec in drafters:
        if spec.kind == DIFFUSION:
            drafter = DrafterSetting(spec, (("DIFFUSION_MAX_STEPS", str(MAX_DENOISING_STEPS)),))
            for gamma, steps in itertools.product(grids.gammas, grids.denoising):
                name = f"{DIFFUSION} gamma={gamma} steps={steps}"
                yield Variant(name, (drafter,), (DIFFUSION,), denoising=Denoising(steps, gamma))


def _ahead(drafters: Sequence[DrafterSpec], values: Sequence[int]) -> Iterator[Variant]:
    for spec in drafters:
        if spec.kind in SMALL_LMS:
            for value in values:
                name = ahead_name(spec.kind, value)
                yield _set(spec, name, ("DRAFT_AHEAD", "on"), ("DRAFT_AHEAD_STEPS", str(value)))


def _contexts(drafters: Sequence[DrafterSpec], values: Sequence[int]) -> Iterator[Variant]:
    for spec, value in itertools.product(drafters, values):
        yield _set(spec, f"{spec.kind} context={value}", ("DRAFT_CONTEXT", str(value)))


def _set(spec: DrafterSpec, name: str, *settings: tuple[str, str]) -> Variant:
    return Variant(name, (DrafterSetting(spec, settings),), (spec.kind,))
