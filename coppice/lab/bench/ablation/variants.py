"""Variants: ways to decode, each a verifier, drafters and what requests ask for; and groups that take turns. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from coppice.cli.topology import DrafterSpec
from coppice.core.denoising import LEFT_TO_DRAFTER, Denoising
from coppice.lab.bench.client import OFF, ON, AcceptanceRule, Mode, Policy

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
