"""Fractions of the target's tokens among a block drafter's first children, by position in the block, and sigmas.

The text is the target's own. Above temperature 0 it was drawn with noise that was not recorded; the noise is redrawn
from its posterior: Gumbel noise, given that the text's token is the largest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from coppice.training.acceptance_report import RANKS, gumbel
from coppice.training.block_layout import BlockLayout

# Candidate scales, in geometric steps, and fewest tokens to choose one by.
_SIGMAS = np.geomspace(0.3, 5.0, 24).round(2).tolist()
_FEWEST = 20
_ROWS_PER_PART = 8


@dataclass(frozen=True, slots=True)
class BlockReport:
    """Fractions of blocks and calibrated sigma, per temperature and position in the block.

    `within_rank[T][j][k]`: the target's j-th token is among the first k + 1 children at depth j, whatever precedes it.
    `sigmas[T][j]`: the scale at which softmax((log q + T * G) / sigma) best predicts the j-th token, if the tokens
    before it were among the first RANKS children, as in a tree. `streaks[T]`: mean number of leading tokens of a block
    that are first children.
    """

    within_rank: dict[float, list[list[float]]]
    sigmas: dict[float, list[float]]
    streaks: dict[float, float]
    blocks: int

    @property
    def by_rank(self) -> list[float]:
        """Probability that a child of the root is right, by rank, at the highest temperature."""
        within = self.within_rank[max(self.within_rank)][0]
        return [share - before for share, before in zip(within, [0.0, *within], strict=False)]

    def described(self) -> str:
        """The table, and what it has, for a card."""
        return f"""\
Share of {self.blocks:,} blocks in the target's continuations of held-out prompts whose j-th token is the first child,
or among the first four, at depth j, both adding the same noise; the calibrated sigma; and the mean number of tokens
from the block's first on that are first children:

{self.table()}"""

    def table(self) -> str:
        """A Markdown table."""
        places = range(1, 1 + len(next(iter(self.sigmas.values()))))
        lines = ["| temperature | | " + " | ".join(f"j={place}" for place in places) + " | streak |"]
        lines.append("|---" * (len(places) + 3) + "|")
        for temperature, shares in self.within_rank.items():
            for rank, name in ((0, "first child"), (RANKS - 1, f"first {RANKS}")):
                cells = [f"{by_rank[rank]:.3f}" for by_rank in shares]
                streak = f"{self.streaks[temperature]:.2f}" if rank == 0 else ""
                lines.append(f"| {temperature} | {name} | " + " | ".join(cells) + f" | {streak} |")
            cells = [f"{sigma:.2f}" for sigma in self.sigmas[temperature]]
            lines.append(f"| {temperature} | sigma | " + " | ".join(cells) + " | |")
        return "\n".join(lines)


@torch.inference_mode()
def measure_blocks(
    target: PreTrainedModel,
    predict: Callable[[Tensor], Tensor],
    rows: dict[float, Tensor],
    layout: BlockLayout,
    seed: int,
) -> BlockReport:
    """Predict fully masked blocks within the target's own text.

    Args:
        target: the target, vocabulary V.
        predict: the drafter's logits [R, G, 1 + K, at least V] of the layout's blocks, from text [R, L].
        rows: per temperature, text that the target said at it, at least after the layout's first anchor.
        layout: positions of the blocks.
        seed: seed of the noise.
    """
    generator = torch.Generator().manual_seed(seed)
    within_rank: dict[float, list[list[float]]] = {}
    sigmas: dict[float, list[float]] = {}
    streaks: dict[float, float] = {}
    blocks = 0
    for temperature, text in rows.items():
        tally = _Tally(1 + layout.num_masks)
        for part in text.split(_ROWS_PER_PART):
            right = part[:, layout.predicted]
            said = target(input_ids=part, use_cache=False).logits[:, layout.predicted - 1].float()
            scores = predict(part)[..., : said.shape[-1]].float().log_softmax(-1)
            if temperature > 0:
                scores += temperature * posterior_noise(said / temperature, right, generator)
            tally.add(scores.flatten(0, 1), right.flatten(0, 1))
        within_rank[temperature], sigmas[temperature] = tally.within_rank(), tally.sigmas()
        streaks[temperature] = tally.streak()
        blocks += tally.blocks
    return BlockReport(within_rank, sigmas, streaks, blocks)


def posterior_noise(logits: Tensor, drawn: Tensor, generator: torch.Generator) -> Tensor:
    """Gumbel noise [..., V] given that the largest of logits + noise is at `drawn` [...].

    The largest sum is Gumbel distributed, and the others are Gumbel variables truncated there.
    """
    log_probs = logits.log_softmax(-1)
    largest = gumbel(drawn[..., None].shape, generator)
    others = log_probs + gumbel(log_probs.shape, generator)
    sums = -torch.logaddexp(-largest, -others)
    return sums.scatter(-1, drawn[..., None], largest) - log_probs


class _Tally:
    """Counts over the blocks of one temperature."""

    def __init__(self, block: int) -> None:
        self.blocks = 0
        self._hits = torch.zeros(block, RANKS)
        self._streak = 0.0
        # Log-likelihood of every sigma [block, sigmas], over tokens whose predecessors were among the first children.
        self._likelihood = np.zeros((block, len(_SIGMAS)))
        self._counts = np.zeros(block)

    def add(self, scores: Tensor, right: Tensor) -> None:
        """Add blocks' scores [blocks, block, V] and right tokens [blocks, block]."""
        ranks = (scores > scores.gather(-1, right[..., None])).sum(-1)
        self.blocks += len(ranks)
        self._hits += torch.stack([(ranks <= rank).sum(0) for rank in range(RANKS)], -1)
        self._streak += float((ranks == 0).int().cumprod(-1).sum())
        near = (ranks < RANKS).int().cumprod(-1)
        reached = torch.cat([torch.ones_like(near[:, :1]), near[:, :-1]], -1).bool()
        for place in range(scores.shape[1]):
            chosen, tokens = scores[reached[:, place], place], right[reached[:, place], place, None]
            self._counts[place] += len(tokens)
            self._likelihood[place] += [
                float((chosen / sigma).log_softmax(-1).gather(1, tokens).sum()) for sigma in _SIGMAS
            ]

    def within_rank(self) -> list[list[float]]:
        shares: list[list[float]] = (self._hits / self.blocks).tolist()
        return shares

    def streak(self) -> float:
        return self._streak / self.blocks

    def sigmas(self) -> list[float]:
        """Likeliest sigma per position; the previous position's if too few blocks got that far."""
        found: list[float] = []
        for place, likelihood in enumerate(self._likelihood):
            enough = self._counts[place] >= _FEWEST or not found
            found.append(_SIGMAS[int(likelihood.argmax())] if enough else found[-1])
        return found
