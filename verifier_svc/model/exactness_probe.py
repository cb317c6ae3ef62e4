"""Load-time probe of strict mode: a row's logits must have the same bits alone and in a batch.

Attention is exact by construction (kernels/cpu/attention.py) or in double precision, but matrix products are a
library's, whose kernels depend on the processor.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from coppice.core.tree import EMPTY_TREE, ROOT, TokenTree, chain
from verifier_svc.engine.kv_cache import SequenceCache
from verifier_svc.engine.pass_plan import SequenceRows, moved
from verifier_svc.extras.redraft.groups import MaskGroup
from verifier_svc.model.rope_regimes import position_limit
from verifier_svc.model.target_model import TargetModel

_PROMPT, _PATH = 40, 6
# First chunk of the prompt, when it is split.
_CHUNK = 16
# Rows of other sequences in the same pass, from few to more than one thread's work. With 8 and 92 there is no padding
# after the last node; libraries treat the end of a tensor, or of a thread's part, differently.
_COMPANY = (1, 8, 9, 92)
# Small passes: tokens of a path verified as a chain, and rows of another sequence. With the root these are 2 to 16
# rows, so that each of the smallest sizes occurs.
_SMALL_PASSES = (*((depth, 0) for depth in range(1, _PATH)), *((_PATH, company) for company in range(10)))


def rows_stand_alone(target: TargetModel, vocab_size: int, seed: int = 0) -> bool:
    """Whether plain decoding, a chunked prompt, and a tree with other sequences in the pass give the same bits."""
    generator = np.random.default_rng(seed)
    prompt, path = (generator.integers(0, vocab_size, size).tolist() for size in (_PROMPT, _PATH))
    expected = _one_by_one(target, prompt, path)
    tree, nodes = _tree_around(path, vocab_size)
    for size in _COMPANY:
        cache, other = SequenceCache(target.cache, 128), SequenceCache(target.cache, 128)
        company = generator.integers(0, vocab_size, size).tolist()
        _last_logits(target, [SequenceRows(cache, prompt[:_CHUNK], wants_logits=False), SequenceRows(other, company)])
        cache.keep(range(_CHUNK))
        logits = _last_logits(target, [SequenceRows(other, company), SequenceRows(cache, prompt[_CHUNK:], tree)])
        same = torch.equal(logits[[0, *(1 + node for node in nodes)]], expected)
        cache.release()
        other.release()
        if not same:
            return False
    return _stands_alone_in_small_passes(target, prompt, path, expected) and _stands_beside_the_end(
        target, prompt, expected
    )


def masks_leave_rows_alone(target: TargetModel, vocab_size: int, num_masks: int, seed: int = 0) -> bool:
    """Whether masks after the root and every node change no bit of other rows, for a target with an adapter.

    Raises:
        IncompatibleError: the target cannot run with masks.
    """
    generator = np.random.default_rng(seed)
    prompt, path = (generator.integers(0, vocab_size, size).tolist() for size in (_PROMPT, _PATH))
    tree, _ = _tree_around(path, vocab_size)
    groups = tuple(MaskGroup(node, num_masks) for node in range(ROOT, len(tree)))
    cache = SequenceCache(target.cache, 512)
    expected = _last_logits(target, [SequenceRows(cache, prompt, tree)])
    for count in range(len(groups) + 1):
        logits = _last_logits(target, [SequenceRows(cache, prompt, tree, masks=groups[:count])])
        if not torch.equal(logits[: 1 + len(tree)], expected):
            break
    cache.release()
    return torch.equal(logits[: 1 + len(tree)], expected)


def _stands_alone_in_small_passes(
    target: TargetModel, prompt: Sequence[int], path: Sequence[int], expected: Tensor
) -> bool:
    cache, other = SequenceCache(target.cache, 128), SequenceCache(target.cache, 128)
    _last_logits(target, [SequenceRows(cache, prompt[:-1], wants_logits=False)])
    cache.keep(range(len(prompt) - 1))
    same = True
    for depth, company in _SMALL_PASSES:
        rows = SequenceRows(cache, prompt[-1:], chain(path[:depth]))
        beside = [SequenceRows(other, [path[0]] * company)] if company else []
        same = same and torch.equal(_last_logits(target, [*beside, rows]), expected[: 1 + depth])
    cache.release()
    other.release()
    return same


def _stands_beside_the_end(target: TargetModel, prompt: Sequence[int], expected: Tensor) -> bool:
    """Whether a prompt's logits have the same bits in a pass with rows at the end of the context."""
    limit = position_limit(target.model)
    is_long = target.rope_boundary is not None and limit > target.rope_boundary
    cache, other = SequenceCache(target.cache, 128), SequenceCache(target.cache, 128, is_long=is_long)
    company = list(prompt[: min(_CHUNK, limit)])
    plan = target.plan([SequenceRows(other, company), SequenceRows(cache, prompt)])
    first, last = plan.logit_ranges[-1]
    logits = target.forward(moved(plan, (limit - len(company), 0)))[first:last]
    cache.release()
    other.release()
    return torch.equal(logits, expected[:1])


def _one_by_one(target: TargetModel, prompt: Sequence[int], path: Sequence[int]) -> Tensor:
    """Logits after the prompt and after every token of the path, one token per pass [1 + path, vocab]."""
    cache = SequenceCache(target.cache, 128)
    rows = []
    pending = list(prompt)
    for token in [*path, 0]:
        rows.append(_last_logits(target, [SequenceRows(cache, pending, EMPTY_TREE)])[0])
        cache.keep(range(len(pending)))
        pending = [token]
    cache.release()
    return torch.stack(rows)


def _last_logits(target: TargetModel, work: list[SequenceRows]) -> Tensor:
    """Logits of the last sequence's rows."""
    plan = target.plan(work)
    first, last = plan.logit_ranges[-1]
    return target.forward(plan)[first:last]


def _tree_around(path: Sequence[int], vocab_size: int) -> tuple[TokenTree, list[int]]:
    """A tree in which every node of the path has a sibling before it, and the path's nodes."""
    tokens: list[int] = []
    parents: list[int] = []
    nodes: list[int] = []
    for token in path:
        above = nodes[-1] if nodes else ROOT
        tokens += [(token + 1) % vocab_size, token]
        parents += [above, above]
        nodes.append(len(tokens) - 1)
    return TokenTree(tuple(tokens), tuple(parents), (0.0,) * len(tokens)), nodes
