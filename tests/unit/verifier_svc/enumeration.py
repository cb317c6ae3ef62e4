"""Exact enumeration on toy vocabularies: every draft, every acceptance, each with its probability.

Written from the definition of "lossless" alone: the block that a rule commits, continued by the target to a fixed
length (so that a bias cannot hide in how long blocks are), must have the target's joint law.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from coppice.core.chance import Chance
from coppice.core.draft_distribution import DraftDistribution, truncated
from coppice.core.sampled_tree import SampledTree
from coppice.core.tree import ROOT
from drafter_svc.drafters.small_lm.sampled_lm import sample_tree
from verifier_svc.verify.acceptance import Acceptance

FloatArray = npt.NDArray[np.float64]
Path = tuple[int, ...]
Outcome = TypeVar("Outcome")
Rule = Callable[[SampledTree, Callable[[int], FloatArray], Chance], Acceptance]
Sampler = Callable[["Languages", Chance], SampledTree]


class Branch:
    """A chance that takes the turns it is told to take, then always the first, and notes the turns it did not take."""

    def __init__(self, turns: Path) -> None:
        self._turns = turns
        self._taken: list[int] = []
        self.weight = 1.0
        self.others: list[Path] = []

    def happens(self, probability: float) -> bool:
        assert 0 <= probability <= 1
        return self._turn([1 - probability, probability]) == 1

    def choice(self, probabilities: FloatArray) -> int:
        assert abs(probabilities.sum() - 1) < 1e-9
        assert probabilities.min() >= 0
        return self._turn(probabilities.tolist())

    def _turn(self, weights: Sequence[float]) -> int:
        step = len(self._taken)
        if step < len(self._turns):
            turn = self._turns[step]
        else:
            turn, *others = [index for index, weight in enumerate(weights) if weight > 0]
            self.others += [(*self._taken, other) for other in others]
        self._taken.append(turn)
        self.weight *= weights[turn]
        return turn


def every_outcome(program: Callable[[Chance], Outcome]) -> Iterator[tuple[Outcome, float]]:
    """What a program can return, once per way of getting there, with the probability of that way."""
    pending: list[Path] = [()]
    while pending:
        branch = Branch(pending.pop())
        outcome = program(branch)
        pending += branch.others
        yield outcome, branch.weight


@dataclass(frozen=True)
class Languages:
    """A target and a draft language over tokens 0 to vocab - 1, as pure functions of (seed, path).

    Each context has a pair of its own kind: ordinary rows, rows with zeros, equal ones, disjoint ones, certain ones.
    `closeness` mixes the target's row into ordinary draft rows. With `max_draft_tokens` the drafter truncates and
    renormalises its rows, as real ones do.
    """

    seed: int
    vocab: int
    kinds: tuple[str, ...] = ("ordinary",)
    closeness: float = 0.5
    max_draft_tokens: int | None = None

    def target(self, path: Path) -> FloatArray:
        return self._rows(path)[0]

    def draft(self, path: Path) -> DraftDistribution:
        row = self._rows(path)[1]
        if self.max_draft_tokens is not None:
            with np.errstate(divide="ignore"):
                return truncated(np.log(row).astype(np.float32), 1.0, self.max_draft_tokens)
        tokens = np.flatnonzero(row)
        return DraftDistribution(tuple(tokens.tolist()), tuple(row[tokens].tolist()))

    def predict(self, paths: Sequence[Path]) -> list[DraftDistribution]:
        return [self.draft(path) for path in paths]

    def after(self, tree: SampledTree) -> Callable[[int], FloatArray]:
        """The target's row behind a node of a tree."""
        return lambda node: self.target(tuple(tree.token_ids[step] for step in tree.path(node))).copy()

    def joint(self, path: Path, length: int) -> FloatArray:
        """The target's law [vocab] * length of the next `length` tokens behind a path."""
        return _joint(self, path, length)

    def _rows(self, path: Path) -> tuple[FloatArray, FloatArray]:
        if path not in self._known:
            self._known[path] = _rows(self, path)
        return self._known[path]

    @functools.cached_property
    def _known(self) -> dict[Path, tuple[FloatArray, FloatArray]]:
        """The rows asked for so far; the languages' own, whose hash takes longer than a look at it."""
        return {}


DEGENERATE = ("ordinary", "zeros", "equal", "equal with zeros", "disjoint", "certain target", "certain draft", "tiny")


def _rows(languages: Languages, path: Path) -> tuple[FloatArray, FloatArray]:
    """The target's and the drafter's row behind a path."""
    rng = np.random.default_rng([languages.seed, languages.vocab, len(path), *path])
    vocab, mix = languages.vocab, languages.closeness
    target, draft = rng.dirichlet(np.ones(vocab), 2)
    draft = mix * target + (1 - mix) * draft
    cut = int(rng.integers(1, vocab))
    order = rng.permutation(vocab)
    kind = languages.kinds[int(rng.integers(len(languages.kinds)))]
    if kind == "zeros":
        target[order[:cut]] = 0
        draft[rng.permutation(vocab)[: int(rng.integers(1, vocab))]] = 0
    elif kind == "equal":
        draft = target
    elif kind == "equal with zeros":
        target[order[:cut]] = 0
        draft = target
    elif kind == "disjoint":
        target[order[:cut]] = 0
        draft[order[cut:]] = 0
    elif kind == "certain target":
        target[order[1:]] = 0
    elif kind == "certain draft":
        draft[order[1:]] = 0
    elif kind == "tiny":
        target[order[0]], draft[order[1]] = 1e-13, 1e-13
    return target / target.sum(), draft / draft.sum()


@functools.cache
def _joint(languages: Languages, path: Path, length: int) -> FloatArray:
    if length == 0:
        return np.ones(())
    rest = [_joint(languages, (*path, token), length - 1) for token in range(languages.vocab)]
    row = languages.target(path).reshape(-1, *(1,) * (length - 1))
    return row * np.stack(rest)


@functools.cache
def sampler(widths: tuple[int, ...], *, with_replacement: bool = False) -> Sampler:
    """Draws a tree of these widths as a drafter does."""
    return lambda languages, chance: sample_tree(widths, languages.predict, chance, with_replacement=with_replacement)


# The rules of trees meet the same drafts one after the other.
@functools.lru_cache(maxsize=64)
def every_draft(draw: Sampler, languages: Languages) -> Sequence[tuple[SampledTree, float]]:
    """Every tree that `draw` can give, with its probability."""
    return tuple(every_outcome(lambda chance: draw(languages, chance)))


def law_of_blocks(blocks: Iterable[tuple[Path, float]], languages: Languages, length: int) -> FloatArray:
    """The law [vocab] * length of the output, from committed blocks and their probabilities."""
    law = np.zeros((languages.vocab,) * length)
    for block, weight in blocks:
        law[block] += weight * languages.joint(block, length - len(block))
    return law


@dataclass(frozen=True)
class Finding:
    """What enumeration says of a rule: total variation from the target's law, and accepted tokens per round."""

    bias: float
    accepted: float


def find(
    rule: Rule,
    draw: Sampler,
    languages: Languages,
    depth: int,
    alter: Callable[[SampledTree], SampledTree] | None = None,
) -> Finding:
    """Run a rule on every tree that `draw` can give, and that `alter` then changes on the way to the rule."""
    blocks: list[tuple[Path, float]] = []
    for drawn, drawn_weight in every_draft(draw, languages):
        tree = alter(drawn) if alter else drawn
        target = languages.after(tree)
        for acceptance, weight in every_outcome(functools.partial(rule, tree, target)):
            assert acceptance.token_ids[:-1] == tuple(tree.token_ids[node] for node in acceptance.nodes)
            assert [tree.parents[node] for node in acceptance.nodes] == [ROOT, *acceptance.nodes][:-1]
            blocks.append((acceptance.token_ids, drawn_weight * weight))
    law = law_of_blocks(blocks, languages, depth + 1)
    assert abs(sum(weight for _, weight in blocks) - 1) < 1e-12
    return Finding(
        bias=float(np.abs(law - languages.joint((), depth + 1)).sum()) / 2,
        accepted=sum((len(block) - 1) * weight for block, weight in blocks),
    )
