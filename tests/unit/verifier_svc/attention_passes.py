"""Passes of random sequences for comparing attention kernels: their caches hold a context that no pass has computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from coppice.core.tree import EMPTY_TREE, TokenTree
from tests.unit.verifier_svc.oracles import random_tree
from verifier_svc.engine.kv_cache import BLOCK_SIZE, IntArray, KVCache, SequenceCache
from verifier_svc.engine.pass_plan import PassPlan, SequenceRows, plan_pass
from verifier_svc.kernels.base import AttentionKernel, AttentionRule
from verifier_svc.kernels.triton.layer_pools import LayerPools, LayerShape
from verifier_svc.model.parallel.tensor_attention import TensorKernel

NO_MOVES: IntArray = np.empty(0, np.int64)


@dataclass(frozen=True)
class Heads:
    """Query heads, key heads, head size, value size."""

    query: int
    key: int
    size: int
    value_size: int


@dataclass(frozen=True)
class Share:
    """A sequence's share of a pass: cached tokens, pending rows, nodes of its tree. `seed` makes its numbers.

    Shares of one seed and as many tokens have the same numbers, wherever the context ends.
    """

    seed: int
    num_context: int
    num_pending: int
    num_nodes: int = 0


class RandomPass:
    """A pass over shares in a cache of their own; a share has the same numbers in any pass."""

    def __init__(self, heads: Heads, shares: Sequence[Share], dtype: torch.dtype, *, row_multiple: int = 1) -> None:
        self.heads = heads
        self.dtype = dtype
        self.num_blocks = 4 + sum(
            (share.num_context + share.num_pending + share.num_nodes) // 64 + 1 for share in shares
        )
        cache = KVCache(self.num_blocks)
        # Blocks out of order, and other ones in other company.
        taken = [cache.take_block() for _ in range(3)]
        work = []
        for share in shares:
            sequence = SequenceCache(cache, 4096)
            sequence.reserve(share.num_context)
            cache.return_blocks(taken[-1:])
            taken = taken[:-1]
            sequence.length = share.num_context
            work.append(SequenceRows(sequence, [0] * share.num_pending, _tree(share)))
        self.plan: PassPlan = plan_pass(work, row_multiple=row_multiple)
        numbers = [self._numbers(share) for share in shares]
        self._contexts = [
            tuple(part[:, : share.num_context] for part in parts[1:])
            for share, parts in zip(shares, numbers, strict=True)
        ]
        padding = len(self.plan.token_ids) - self.plan.num_rows
        rows = [[part[:, share.num_context :] for part in parts] for share, parts in zip(shares, numbers, strict=True)]
        self.query, self.key, self.value = (
            torch.nn.functional.pad(torch.cat(parts, 1), (0, 0, 0, padding)) for parts in zip(*rows, strict=True)
        )

    def _numbers(self, share: Share) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of all tokens [heads, tokens, size]."""
        generator = torch.Generator().manual_seed(share.seed)
        tokens, heads = share.num_context + share.num_pending + share.num_nodes, self.heads
        shapes = (
            (heads.query, tokens, heads.size),
            (heads.key, tokens, heads.size),
            (heads.key, tokens, heads.value_size),
        )
        query, key, value = (torch.randn(shape, generator=generator).to(self.dtype) for shape in shapes)
        return query, key, value

    def run(self, kernel: AttentionKernel, rule: AttentionRule, device: str = "cpu") -> list[Tensor]:
        """Outputs of each share's rows [rows, heads, value size]."""
        output = self.run_padded(kernel, rule, device)
        return [output[segment.start : segment.stop] for segment in self.plan.segments]

    def run_padded(self, kernel: AttentionKernel, rule: AttentionRule, device: str = "cpu") -> Tensor:
        """Outputs of all rows, those of padding last. What no sequence owns is not a number."""
        kernel.allocate(self.num_blocks)
        for segment, (keys, values) in zip(self.plan.segments, self._contexts, strict=True):
            slots = torch.from_numpy(segment.slots(0, segment.num_context)).to(device)
            for pool, new in zip(self.pools(kernel), (keys, values), strict=True):
                pool[slots // BLOCK_SIZE, :, slots % BLOCK_SIZE] = new.transpose(0, 1).to(device)
        kernel.begin(self.plan, NO_MOVES, NO_MOVES)
        query, key, value = (tensor.to(device) for tensor in (self.query, self.key, self.value))
        return kernel.attend(0, query, key, value, rule).cpu()

    def pools(self, kernel: AttentionKernel) -> tuple[Tensor, Tensor]:
        """A kernel's keys and values of layer 0 [blocks, key heads, BLOCK_SIZE, size], writable."""
        if isinstance(kernel, TensorKernel):
            if 0 not in kernel._keys:
                slots = self.num_blocks * BLOCK_SIZE
                kernel._keys[0] = torch.full((slots, *self.key.shape[::2]), torch.nan, dtype=self.dtype)
                kernel._values[0] = torch.full((slots, *self.value.shape[::2]), torch.nan, dtype=self.dtype)
            keys, values = (
                pool.view(self.num_blocks, BLOCK_SIZE, *pool.shape[1:]).transpose(1, 2)
                for pool in (kernel._keys[0], kernel._values[0])
            )
            return keys, values
        pools: LayerPools = kernel._pools  # type: ignore[attr-defined]
        is_new = 0 not in pools._layers
        shape = LayerShape(self.heads.key, self.heads.size, self.heads.value_size, self.dtype)
        keys, values = pools.layer(0, shape)
        if is_new:
            keys.fill_(torch.nan)
            values.fill_(torch.nan)
        return keys, values


def _tree(share: Share) -> TokenTree:
    if not share.num_nodes:
        return EMPTY_TREE
    return random_tree(np.random.default_rng(share.seed), 1000, share.num_nodes)
