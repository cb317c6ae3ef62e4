"""What is compared: verifiers by their settings, and groups of variants that take turns. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from coppice.cli.topology import DrafterSpec
from coppice.lab.bench.ablation.variants import FULL_TREES, DrafterSetting
from coppice.lab.bench.contenders import OFF, ON
from orchestrator.request.rounds import REDRAFT

SPACE = "space"
SWITCHES = ("off", "on", "auto", "compare")
COMPARE = SWITCHES[-1]

# Masks in a group and groups in a round that are tried.
MASKS = (1, 2, 3, 5)
GROUPS = (1, 2, 4)
# A verifier's own limit on the rows of a pass with masks would cut the larger of them.
_MANY_ROWS = ("REDRAFT_ROWS", "64")
# Where pruning is compared: full trees of the target's own, more masks and more ends, whatever the rows of a pass.
_FULL_REDRAFTS = (
    ("REDRAFT_MIN_PROBABILITY", "0"),
    ("REDRAFT_TOKENS", "3"),
    ("REDRAFT_GROUPS", "4"),
    ("REDRAFT_ROWS", "4096"),
)


@dataclass(frozen=True, slots=True)
class VerifierSetting:
    """A verifier process: its environment."""

    settings: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return " ".join(["verifier", *(f"{name}={value}" for name, value in self.settings if "/" not in value)])


PLAIN = VerifierSetting()


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to decode: a verifier, perhaps a drafter, and the sources that requests name; none is plain decoding."""

    name: str
    verifier: VerifierSetting
    sources: tuple[str, ...]
    drafter: DrafterSetting | None = None
    # None leaves it to the server.
    max_nodes: int | None = None
    # Each round waits for its draft, so that trees do not depend on the machine.
    synchronous: bool = False

    @property
    def contender(self) -> str:
        """The name of its contender; all that speculate must say what plain decoding says."""
        return f"{ON} {self.name}" if self.sources else OFF


@dataclass(frozen=True, slots=True)
class Group:
    """Variants that take turns with so many requests at once; the first is plain decoding.

    Where prompts are known, what was computed for them before is used again: almost every pass then decodes.
    """

    name: str
    variants: tuple[Variant, ...]
    batch_size: int = 1
    knows_prompts: bool = False


@dataclass(frozen=True, slots=True)
class InPass:
    """What there is to compare.

    `space` is a directory with an adapter of `num_masks` masks and `early_head` one with a head; empty: there is none.
    """

    drafter: DrafterSpec
    space: str = ""
    num_masks: int = 0
    early_head: str = ""
    masks: tuple[int, ...] = MASKS
    groups: tuple[int, ...] = GROUPS
    tree_sizes: tuple[int, ...] = ()
    batch_sizes: tuple[int, ...] = ()
    # Whether drafting is compared, too, and not pruning alone.
    drafting: bool = True

    @property
    def grid(self) -> tuple[tuple[int, int], ...]:
        """Masks and groups that are tried; an adapter has only so many masks."""
        return tuple((masks, groups) for masks in self.masks if masks <= self.num_masks for groups in self.groups)


DRAFTING = "drafting"


def pruning_group(batch_size: int) -> str:
    """The name of the group that compares pruning with so many requests at once."""
    return f"pruning b={batch_size}"


def grid_name(masks: int, groups: int) -> str:
    """The name of the variant whose target drafts for itself with so many masks behind so many ends."""
    return f"{SPACE} k={masks} g={groups}"


def merged_name(kind: str) -> str:
    """The name of the variant that merges the target's own drafts with a drafter's."""
    return f"{SPACE}+{kind}"


def tree_sources(what: InPass) -> tuple[str, ...]:
    """Whose trees are pruned: first of all the target's own."""
    return (REDRAFT, what.drafter.kind) if what.space else (what.drafter.kind,)


def pruning_name(source: str, num_nodes: int, switch: str) -> str:
    """The name of the variant with a source's trees of so many nodes and this setting of early pruning."""
    return f"{source} n={num_nodes} pruning {switch}"


def make_groups(what: InPass) -> tuple[Group, ...]:
    """Everything that there is to compare."""
    plain = Variant("", PLAIN, ())
    groups = [Group(DRAFTING, (plain, *_drafting(what)))] if what.drafting else []
    if what.early_head:
        pruning = tuple(_pruning(what))
        groups += [Group(pruning_group(size), (plain, *pruning), size, True) for size in what.batch_sizes]
    return tuple(groups)


def space_names(what: InPass) -> list[str]:
    """The names of the variants whose target drafts for itself, alone."""
    return [SPACE, *(grid_name(masks, groups) for masks, groups in what.grid)] if what.space else []


def _drafting(what: InPass) -> Iterator[Variant]:
    kind, drafter = what.drafter.kind, DrafterSetting(what.drafter)
    if what.space:
        adapter = ("SPACE_ADAPTER", what.space)
        # As it serves where nothing else is set.
        usual = VerifierSetting((adapter,))
        yield Variant(SPACE, usual, (REDRAFT,))
        for masks, groups in what.grid:
            shape = (("REDRAFT_TOKENS", str(masks)), ("REDRAFT_GROUPS", str(groups)), _MANY_ROWS)
            yield Variant(grid_name(masks, groups), VerifierSetting((adapter, *shape)), (REDRAFT,))
        yield Variant(merged_name(kind), usual, (REDRAFT, kind), drafter)
    yield Variant(kind, PLAIN, (kind,), drafter)


def _pruning(what: InPass) -> Iterator[Variant]:
    kind, full = what.drafter.kind, DrafterSetting(what.drafter, FULL_TREES)
    own: tuple[tuple[str, str], ...] = ()
    if what.space:
        own = (("SPACE_ADAPTER", what.space), ("REDRAFT_NODES", str(max(what.tree_sizes))), *_FULL_REDRAFTS)
    for source in tree_sources(what):
        for num_nodes in what.tree_sizes:
            for switch in SWITCHES:
                name = pruning_name(source, num_nodes, switch)
                verifier = VerifierSetting((*own, ("EARLY_HEAD", what.early_head), ("EARLY_PRUNING", switch)))
                if source == REDRAFT:
                    yield Variant(name, verifier, (REDRAFT,), max_nodes=num_nodes)
                else:
                    yield Variant(name, verifier, (kind,), full, num_nodes, synchronous=True)
