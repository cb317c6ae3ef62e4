"""Token trees sampled from a drafter's own distribution, for the rejection rules. Pure: knows neither models nor seeds.

How many children a level has is fixed before anything is drawn, as in SpecInfer (Miao et al. 2305.09781, static
expansion): a shape that looked at what was drawn could favour some tokens, and the rules would not know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coppice.core.chance import Chance
from coppice.core.draft_distribution import DraftDistribution
from coppice.core.sampled_tree import SampledTree
from coppice.core.tree import ROOT

Path = tuple[int, ...]
# The distributions behind the tokens of several paths, in one forward pass.
Predict = Callable[[Sequence[Path]], Sequence[DraftDistribution]]


def sample_tree(
    widths: Sequence[int], predict: Predict, chance: Chance, *, with_replacement: bool = False
) -> SampledTree:
    """A tree of `len(widths)` levels; every node of level i (the root is level 0) gets `widths[i]` children.

    Without replacement, a node whose distribution has fewer tokens gets them all.
    """
    token_ids: list[int] = []
    parents: list[int] = []
    distributions: list[DraftDistribution | None] = [None]
    level: list[tuple[int, Path]] = [(ROOT, ())]
    for width in widths:
        below: list[tuple[int, Path]] = []
        for (node, path), distribution in zip(level, predict([path for _, path in level]), strict=True):
            distributions[node + 1] = distribution
            for token in sample_children(distribution, width, chance, with_replacement=with_replacement):
                below.append((len(token_ids), (*path, token)))
                token_ids.append(token)
                parents.append(node)
                distributions.append(None)
        level = below
    return SampledTree(tuple(token_ids), tuple(parents), tuple(distributions), with_replacement)


def sample_children(
    distribution: DraftDistribution, count: int, chance: Chance, *, with_replacement: bool
) -> tuple[int, ...]:
    """Tokens drawn from a distribution one after another."""
    tokens: list[int] = []
    while len(tokens) < count:
        token = distribution.token_ids[chance.choice(distribution.probabilities)]
        tokens.append(token)
        if with_replacement:
            continue
        if len(distribution) == 1:
            break
        distribution = distribution.without(token)
    return tuple(tokens)
