"""Run that fits heads to text with the target's distributions: a few steps, each from all of the text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from coppice.training.block_layout import BlockLayout, random_layout
from coppice.training.block_losses import position_weights, weighted
from coppice.training.teacher import TaughtRows, committed_states
from drafter_svc.training.head_fit import HeadSums, best_shares
from drafter_svc.training.trunk import Trunk

# One batch in so many is used for the curvature, which needs few.
_CURVATURE_EVERY = 8
# One batch in so many judges the steps; none is made from it.
_JUDGING_ONE_IN = 16


@dataclass(frozen=True, slots=True)
class FeatureRecipe:
    """Everything that decides the result of a run, but for the target and the trunk.

    In every step, `groups` blocks of each row are predicted, `rows` rows at a time. `position_decay` is the number of
    places over which a token's weight falls by a factor of e. Heads have a `rank` together.
    """

    steps: int
    rows: int = 6
    sample_rows: int = 512
    corpus_rows: int = 256
    groups: int = 64
    rank: int = 96
    position_decay: float = 4.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Blocks in some text, what the output layer is given of them, and what heads are given."""

    layout: BlockLayout
    text: TaughtRows
    rows: Tensor
    inputs: Tensor


class HeadRun:
    """Fits heads [P, H, D], which begin as nothing. A killed run goes on after the last step that it has made."""

    def __init__(self, trunk: Trunk, taught: TaughtRows, recipe: FeatureRecipe, state_dir: Path) -> None:
        """`taught` has the target's states."""
        if taught.states is None:
            raise ValueError("the text has no hidden states")
        self._trunk = trunk
        self._taught = taught
        self._recipe = recipe
        self._path = state_dir / "heads.pt"
        hidden = trunk.table.shape[1]
        shape = 1 + trunk.calibration.num_masks, taught.states.shape[-1] + hidden, hidden
        self._shape = shape
        self.sums = HeadSums(*shape)
        self.heads = torch.zeros(shape[0], shape[2], shape[1])
        self.curve: list[dict[str, float]] = []
        self.seconds = 0.0

    def run(self, held_out: Callable[[Tensor], float]) -> None:
        """Make the steps that are left; `held_out` gives the loss of heads on other text, for the curve."""
        self._restore()
        if not self.curve:
            self._note(0, self._mean(self._judge(self.heads)), held_out(self.heads), 0.0)
        for step in range(len(self.curve), 1 + self._recipe.steps):
            started = time.monotonic()
            self.sums = self._sums(step)
            losses = self._take(self.sums.step())
            self._note(step, self._mean(losses), held_out(self.heads), time.monotonic() - started)
            self._save()

    def _take(self, change: Tensor) -> Tensor:
        """Go the share of a step that lowers each place's loss most; returns the losses then [P]."""
        shares, losses = best_shares(lambda share: self._judge(self.heads + share * change), self._judge(self.heads))
        self.heads = self.heads + shares[:, None, None] * change
        return losses

    def _mean(self, losses: Tensor) -> float:
        return float(weighted(losses, position_weights(len(losses), self._recipe.position_decay)))

    def _note(self, step: int, loss: float, held_out: float, seconds: float) -> None:
        self.seconds += seconds
        self.curve.append({"step": step, "train": loss, "held_out": held_out, "seconds": self.seconds})

    def _sums(self, step: int) -> HeadSums:
        sums = HeadSums(*self._shape)
        numbers = [number for number in range(self._num_batches) if number % _JUDGING_ONE_IN]
        bar = tqdm(numbers, desc=f"step {step} of {self._recipe.steps}", mininterval=5)
        for count, blocks in enumerate(self._blocks(bar, step)):
            rows = (blocks.rows + self._said(self.heads, blocks.inputs)).requires_grad_()
            logits = self._trunk.logits(blocks.layout, blocks.text.token_ids, rows)
            (slopes,) = torch.autograd.grad(-_terms(blocks, logits).sum(), rows)
            is_known = blocks.inputs.flatten(0, 1).any(-1)
            sums.add(blocks.inputs.flatten(0, 1)[is_known], slopes.flatten(0, 1)[is_known])
            if count % _CURVATURE_EVERY == 0:
                sums.add_curvature(logits.detach().softmax(-1).flatten(0, 1), self._trunk.table)
        return sums

    @torch.no_grad()
    def _judge(self, heads: Tensor) -> Tensor:
        """The losses of heads [P] on the batches for judging, in the same blocks every time."""
        numbers = range(0, self._num_batches, _JUDGING_ONE_IN)
        losses = []
        for blocks in self._blocks(numbers, 0):
            rows = blocks.rows + self._said(heads, blocks.inputs)
            logits = self._trunk.logits(blocks.layout, blocks.text.token_ids, rows)
            losses.append(_terms(blocks, logits).mean((0, 1)))
        return torch.stack(losses).mean(0)

    @staticmethod
    def _said(heads: Tensor, inputs: Tensor) -> Tensor:
        return torch.einsum("phd,rgd->rgph", heads, inputs)

    @property
    def _num_batches(self) -> int:
        return -(-len(self._taught) // self._recipe.rows)

    def _blocks(self, numbers: Iterator[int] | range | tqdm[int], step: int) -> Iterator[_Blocks]:
        """Blocks at random places of batches; a function of seed, step and number."""
        length, num_masks = self._taught.token_ids.shape[1], self._trunk.calibration.num_masks
        for number in numbers:
            generator = torch.Generator().manual_seed((self._recipe.seed * 1_003 + step) * 1_000_003 + number)
            layout = random_layout(length, self._recipe.groups, num_masks, False, generator)
            text = self._taught.part(slice(number * self._recipe.rows, (number + 1) * self._recipe.rows))
            assert text.states is not None
            inputs = self._trunk.inputs(layout, text.token_ids, committed_states(text.states, 0))
            yield _Blocks(layout, text, self._trunk.rows(layout, text.token_ids), inputs)

    def _save(self) -> None:
        state = {"heads": self.heads, "curve": self.curve, "seconds": self.seconds, "sums": self.sums.state()}
        temporary = self._path.with_suffix(".tmp")
        torch.save(state, temporary)
        temporary.replace(self._path)

    def _restore(self) -> None:
        if self._path.exists():
            state = torch.load(self._path, weights_only=True)
            self.heads, self.curve, self.seconds = state["heads"], state["curve"], state["seconds"]
            self.sums.restore(state["sums"])


def _terms(blocks: _Blocks, logits: Tensor) -> Tensor:
    """KL from the target's view, for each token of each block."""
    return blocks.text.terms(logits, blocks.layout.predicted, 0.0)
