"""Losses of block drafters. Terms are [rows, groups, block], in nats per token; losses are means."""

from __future__ import annotations

import torch
from torch import Tensor

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
