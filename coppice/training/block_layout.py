"""Layout of a training row for block drafters, text and then groups of masks that see parts of it, and their losses.

This is SPACE's second layout (Yi et al. 2402.11809, `mask_efficient_train`), with many groups that do not see each
other. A group follows an anchor, the token that would be the last committed one: it sees the text up to the anchor.

Axes: R rows, L tokens of a row, G groups, K rows of a group (masks), N = L + G * K, V vocabulary. A block has 1 + K
tokens: the first is predicted by the anchor's row, the following ones by the K masks. Terms of losses are
[rows, groups, block], in nats per token; losses are means.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Groups of `num_masks` after `anchors` [G], which all rows share, in text of `length` tokens.

    `sees_all`: whether a group's rows see those after them in the group.
    """

    length: int
    anchors: Tensor
    num_masks: int
    sees_all: bool

    @property
    def predicted(self) -> Tensor:
        """Positions [G, 1 + K] of the tokens whose logits `run` returns."""
        return self.anchors[:, None] + 1 + torch.arange(1 + self.num_masks)

    @property
    def visible(self) -> Tensor:
        """Attention mask [N, N]."""
        count = len(self.anchors)
        total = self.length + count * self.num_masks
        visible = torch.zeros(total, total, dtype=torch.bool)
        visible[: self.length, : self.length] = torch.ones(self.length, self.length, dtype=torch.bool).tril()
        behind = self.anchors.repeat_interleave(self.num_masks)
        visible[self.length :, : self.length] = torch.arange(self.length) <= behind[:, None]
        block = torch.ones(self.num_masks, self.num_masks)
        visible[self.length :, self.length :] = torch.kron(torch.eye(count), block if self.sees_all else block.tril())
        return visible

    @property
    def positions(self) -> Tensor:
        """Positions [N]."""
        return torch.cat([torch.arange(self.length), self.predicted[:, :-1].flatten()])

    def run(self, model: nn.Module, token_ids: Tensor, groups: Tensor) -> Tensor:
        """Logits [R, G, 1 + K, V] of the blocks' tokens.

        Args:
            model: a causal language model of transformers.
            token_ids: the text [R, L].
            groups: ids of the groups' rows [R, G, K].
        """
        rows, count = len(token_ids), len(self.anchors)
        wanted = torch.cat([self.anchors, self.length + torch.arange(count * self.num_masks)])
        model_: Any = model
        logits: Tensor = model_(
            input_ids=torch.cat([token_ids, groups.flatten(1)], 1),
            attention_mask=self.visible[None, None].expand(rows, 1, -1, -1),
            position_ids=self.positions[None].expand(rows, -1),
            use_cache=False,
            logits_to_keep=wanted,
        ).logits
        first, later = logits[:, :count, None], logits[:, count:].unflatten(1, (count, self.num_masks))
        return torch.cat([first, later], 2)


def random_layout(length: int, groups: int, num_masks: int, sees_all: bool, generator: torch.Generator) -> BlockLayout:
    """Anchors at random places that have a whole block after them."""
    last = length - num_masks - 2
    anchors = torch.randperm(last + 1, generator=generator)[:groups].sort().values
    return BlockLayout(length, anchors, num_masks, sees_all)


def even_layout(length: int, first: int, groups: int, num_masks: int, sees_all: bool) -> BlockLayout:
    """Evenly spaced anchors from `first` on."""
    last = length - num_masks - 2
    anchors = torch.linspace(first, last, groups).long()
    return BlockLayout(length, anchors, num_masks, sees_all)


# Lowest mask rate whose inverse is used as a weight: lower ones would let single groups dominate a step.
MIN_RATE = 0.1


def position_weights(block: int, decay: float) -> Tensor:
    """exp(-(j - 1) / decay) for the j-th token of a block, made to add up to 1: what stands after an error is lost."""
    weights = torch.exp(-torch.arange(block) / decay)
    return weights / weights.sum()


def weighted(terms: Tensor, weights: Tensor) -> Tensor:
    """Mean over groups of terms weighted by position."""
    return (terms * weights).sum(-1).mean()


def token_terms(logits: Tensor, token_ids: Tensor) -> Tensor:
    """-log q of the given tokens; logits [..., vocab]."""
    return -logits.float().log_softmax(-1).gather(-1, token_ids[..., None])[..., 0]


def diffusion_loss(token_losses: Tensor, hidden: Tensor, rates: Tensor) -> Tensor:
    """Bound of masked diffusion: losses of masked tokens divided by their mask rate, per token.

    Args:
        token_losses: -log q of the true tokens [rows, groups, block].
        hidden: which tokens were masked [rows, groups, block].
        rates: their mask rates [rows, groups, block].
    """
    return (token_losses * hidden / rates.clamp_min(MIN_RATE)).mean()


def streak_loss(terms: Tensor, token_losses: Tensor, weights: Tensor) -> Tensor:
    """Streak distillation with cross entropies: sum over j of w_j * term_j.

    w_j is the drafter's probability of the tokens before the j-th in the text, without gradient (the chance that the
    verifier gets that far, Sandler et al. 2511.00606), times the position's weight.
    """
    before = torch.cumsum(-token_losses.detach(), -1) + token_losses.detach()
    return weighted(before.exp() * terms, weights)
