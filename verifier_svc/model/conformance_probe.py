"""Load-time probe: tree passes must give the logits of plain forwards.

Many architectures run without an error and give wrong tokens when their attention is replaced (recurrent layers,
chunked attention, masks of their own). The real weights are therefore tried on random trees before the server is ready.

In others a row depends on the largest position of its pass, as with some rotary embeddings. A text at the start of
the context is therefore tried together with one at its end, which costs no more than two short texts.
"""

from __future__ import annotations

import logging

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from coppice.core.errors import IncompatibleError
from coppice.core.tree import ROOT, TokenTree, chain
from verifier_svc.engine.kv_cache import SequenceCache
from verifier_svc.engine.pass_plan import SequenceRows, moved
from verifier_svc.layers.attention_traits import last_plain_start
from verifier_svc.model.rope_regimes import position_limit
from verifier_svc.model.target_model import TargetModel

logger = logging.getLogger(__name__)

_PREFIXES = (23, 40)
_NODES = 10
_ROUNDS = 2
# Tokens of the texts at both ends of the context; all but the first few are a chain.
_END_TOKENS, _END_PENDING = 12, 4
# Largest difference between logits that counts as rounding, relative to their spread.
TOLERANCES = {torch.float32: 2e-3, torch.bfloat16: 0.25, torch.float16: 0.1}


class ConformanceProbe:
    """Compares tree passes with plain forwards. Must be built before tree attention is installed."""

    def __init__(
        self, model: PreTrainedModel, vocab_size: int, seed: int = 0, dtype: torch.dtype | None = None
    ) -> None:
        """`dtype` sets the tolerance for rounding; by default the model's own."""
        self.dtype = dtype or next(model.parameters()).dtype
        generator = np.random.default_rng(seed)
        self._prefixes = [generator.integers(0, vocab_size, size).tolist() for size in _PREFIXES]
        self._trees = [[random_tree(generator, vocab_size, _NODES) for _ in _PREFIXES] for _ in range(_ROUNDS)]
        self._expected = self._plain_logits(model)
        self._position_limit = position_limit(model)
        tokens = min(_END_TOKENS, self._position_limit)
        self._ends = [generator.integers(0, vocab_size, tokens).tolist() for _ in range(2)]
        self._starts = 0, last_plain_start(model, self._position_limit - tokens)
        self._expected_ends = [
            _logits_from(model, text, start) for text, start in zip(self._ends, self._starts, strict=True)
        ]

    def check(self, target: TargetModel) -> float:
        """Run the same tokens as trees; returns the largest difference of any logit.

        Raises:
            IncompatibleError: the logits differ by more than rounding.
        """
        spread = torch.cat(self._expected[0]).std().item()
        limit = TOLERANCES[self.dtype] * max(1.0, spread)
        self._check_ends(target, limit)
        caches = [SequenceCache(target.cache, 256) for _ in self._prefixes]
        pending = [list(prefix) for prefix in self._prefixes]
        largest = 0.0
        for trees, expected in zip(self._trees, self._expected, strict=True):
            rows = [
                SequenceRows(cache, tokens, tree) for cache, tokens, tree in zip(caches, pending, trees, strict=True)
            ]
            plan = target.plan(rows)
            logits = target.forward(plan)
            for index, (first, last) in enumerate(plan.logit_ranges):
                largest = max(largest, (logits[first:last] - expected[index]).abs().max().item())
                path = _deepest_path(trees[index])
                num_pending = len(pending[index])
                caches[index].keep([*range(num_pending), *(num_pending + node for node in path[:-1])])
                pending[index] = [trees[index].token_ids[path[-1]]]
        for cache in caches:
            cache.release()
        if not largest <= limit:
            raise IncompatibleError(
                f"{type(target.model).__name__} gives other logits over token trees (difference {largest:.3g}, "
                f"allowed {limit:.3g}): this architecture is not supported"
            )
        logger.info("probe passed: largest logit difference %.2e", largest)
        return largest

    def _check_ends(self, target: TargetModel, limit: float) -> None:
        """Run a text at the start of the context together with one at its end."""
        is_long = target.rope_boundary is not None and self._position_limit > target.rope_boundary
        caches = [SequenceCache(target.cache, 64, is_long=is_far and is_long) for is_far in (False, True)]
        rows = [
            SequenceRows(cache, text[:_END_PENDING], chain(text[_END_PENDING:]))
            for cache, text in zip(caches, self._ends, strict=True)
        ]
        plan = moved(target.plan(rows), self._starts)
        logits = target.forward(plan)
        for cache in caches:
            cache.release()
        differences = [
            (logits[first:last] - expected).abs().max().item()
            for (first, last), expected in zip(plan.logit_ranges, self._expected_ends, strict=True)
        ]
        if not max(differences) <= limit:
            raise IncompatibleError(
                f"{type(target.model).__name__} gives other logits when a text near position {self._position_limit} is "
                f"computed beside a short one (difference {max(differences):.3g}, allowed {limit:.3g}): something in "
                "it depends on the longest text of a pass, which is not supported"
            )

    @torch.inference_mode()
    def _plain_logits(self, model: PreTrainedModel) -> list[list[Tensor]]:
        """Per round and sequence: logits of the root and of every node, each path to a leaf run on its own."""
        contexts = [list(prefix) for prefix in self._prefixes]
        rounds: list[list[Tensor]] = []
        for trees in self._trees:
            results = []
            for context, tree in zip(contexts, trees, strict=True):
                results.append(_path_logits(model, context, tree))
                context += [tree.token_ids[node] for node in _deepest_path(tree)]
            rounds.append(results)
        return rounds


def _path_logits(model: PreTrainedModel, context: list[int], tree: TokenTree) -> Tensor:
    """Plain logits of the root and of every node [1 + nodes, vocab], each path to a leaf run on its own."""
    device = next(model.parameters()).device
    rows: dict[int, Tensor] = {}
    for leaf in set(range(len(tree))) - set(tree.parents):
        path = tree.path(leaf)
        ids = [*context, *(tree.token_ids[node] for node in path)]
        logits = model(input_ids=torch.tensor([ids], device=device), use_cache=False).logits[0].float().cpu()
        # A copy, so that the logits of the context need not be kept.
        for node, row in zip((ROOT, *path), logits[len(context) - 1 :].clone(), strict=True):
            rows[node] = row
    return torch.stack([rows[node] for node in range(ROOT, len(tree))])


@torch.inference_mode()
def _logits_from(model: PreTrainedModel, text: list[int], start: int) -> Tensor:
    """Plain logits of a text at positions from `start` on, from its last pending token on [rows, vocab]."""
    device = next(model.parameters()).device
    positions = torch.arange(start, start + len(text), device=device)[None]
    output = model(input_ids=torch.tensor([text], device=device), position_ids=positions, use_cache=False)
    logits: Tensor = output.logits[0, _END_PENDING - 1 :].float().cpu()
    return logits


def random_tree(generator: np.random.Generator, vocab_size: int, num_nodes: int) -> TokenTree:
    """A tree of `num_nodes` nodes with different tokens, limited by the vocabulary."""
    tokens = generator.choice(vocab_size, min(num_nodes, vocab_size), replace=False).tolist()
    parents = [int(generator.integers(-1, node)) if node else -1 for node in range(len(tokens))]
    return TokenTree(tuple(tokens), tuple(parents), (0.0,) * len(tokens))


def _deepest_path(tree: TokenTree) -> tuple[int, ...]:
    return tree.path(max(range(len(tree)), key=lambda node: tree.depths[node]))
