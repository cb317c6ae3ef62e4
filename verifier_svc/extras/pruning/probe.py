"""Load-time probe of early pruning: remaining rows must have the same logits as in the whole pass.

Models differ in arguments passed between layers and in operations after the output layer. Pruning is therefore tried on
the real weights, with scores that keep random parts of random trees.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from coppice.core.errors import IncompatibleError
from verifier_svc.engine.kv_cache import SequenceCache
from verifier_svc.engine.pass_plan import PassPlan, SequenceRows
from verifier_svc.extras.pruning.rows import num_candidates, survivors_of
from verifier_svc.model.conformance_probe import TOLERANCES, random_tree
from verifier_svc.model.output_layer import RowStates, output_layer
from verifier_svc.model.target_model import TargetModel
from verifier_svc.verify.draw_rule import DrawRule

_PROMPT, _NODES, _ROUNDS = 40, 24, 4
_SHARE_PRUNED = 0.3
_RULE = DrawRule(0.0, 0, 0.0)


def check_pruning(
    target: TargetModel, vocab_size: int, *, exact: bool, dtype: torch.dtype | None = None, seed: int = 0
) -> None:
    """Try early pruning on a target with a head; `dtype` sets the tolerance for rounding, by default the model's own.

    Raises:
        IncompatibleError: remaining rows have other logits than in the whole pass, or with `exact` other bits; or the
            head's scores are computed differently from the target's logits.
    """
    generator = np.random.default_rng(seed)
    name = type(target.model).__name__
    limit = TOLERANCES[dtype or next(target.model.parameters()).dtype]
    caches = [SequenceCache(target.cache, 256) for _ in range(2)]
    try:
        for _ in range(_ROUNDS):
            work = [
                SequenceRows(
                    cache,
                    generator.integers(0, vocab_size, _PROMPT).tolist(),
                    random_tree(generator, vocab_size, _NODES),
                    True,
                    (),
                    rule,
                )
                for cache, rule in zip(caches, (_RULE, None), strict=True)
            ]
            plan = target.plan(work)
            with RowStates(target.model) as states:
                whole = target.forward(plan)
            inputs = states.of(None)
            if len(inputs) != len(whole):
                inputs = inputs[torch.from_numpy(plan.logit_rows).to(inputs.device)]
            spread = max(1.0, whole.std().item())
            scores = _random_scores(generator, num_candidates(plan))
            left, forward = target.forward_pruned(plan, scores)
            expected = _rows_left(whole, plan, forward.plan)
            difference = (left[: len(expected)] - expected).abs().max().item()
            if not difference <= limit * spread:
                raise IncompatibleError(
                    f"{name} gives other logits once nodes are pruned (difference {difference:.3g}): early pruning is "
                    f"not supported"
                )
            if exact and not torch.equal(left[: len(expected)], expected):
                raise IncompatibleError("once nodes are pruned, rows have other bits: use EXACTNESS=fast")
            tokens = torch.from_numpy(generator.integers(0, vocab_size, len(inputs)))
            scored = output_layer(target.model).scores(inputs, tokens.to(inputs.device)).cpu()
            if not (scored - whole.gather(1, tokens[:, None])[:, 0]).abs().max().item() <= limit * spread:
                raise IncompatibleError(f"{name} makes its logits in a way that an early head cannot follow")
            # With the head's own scores too, so that no request pays for compilation.
            target.forward_pruned(plan)
    finally:
        for cache in caches:
            cache.release()


def _rows_left(whole: Tensor, plan: PassPlan, left: PassPlan) -> Tensor:
    """Logits of a whole pass for the remaining rows."""
    kept: list[int] = []
    for segment, (first, _) in zip(left.segments, plan.logit_ranges, strict=True):
        kept += [first, *(first + 1 + node for node in survivors_of(segment))]
    return whole[kept]


def _random_scores(generator: np.random.Generator, count: int) -> Tensor:
    return torch.from_numpy(np.where(generator.random(count) < _SHARE_PRUNED, -np.inf, np.inf))
