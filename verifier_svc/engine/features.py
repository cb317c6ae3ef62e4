"""Features: the target's hidden states of the row before each token, from which it was drawn, as in EAGLE-3.

Those of a low, a middle and a high layer, side by side. Known in the pass that commits the tokens, or that reads them
as part of a prompt. In bfloat16, for drafters that request them; they are hints.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from coppice.core.errors import IncompatibleError
from coppice.core.tree import ROOT
from verifier_svc.engine.kv_cache import BLOCK_SIZE, HalfArray, SequenceCache
from verifier_svc.engine.pass_plan import SequenceRows
from verifier_svc.model.target_model import TargetModel
from verifier_svc.verify.acceptance import Acceptance


@dataclass(frozen=True, slots=True)
class FeatureShape:
    """Layers of a feature, none if not available, and its width over all of them."""

    layers: tuple[int, ...] = ()
    size: int = 0


def committed_features(states: HalfArray, accepted: Acceptance) -> bytes:
    """Row-major [tokens, feature size]. `states` [1 + nodes, feature size] are the root's and the tree's rows."""
    return states[[node - ROOT for node in accepted.drawn_behind]].tobytes()


def offered_features(target: TargetModel) -> FeatureShape:
    """Features that a target gives; an empty shape if they are not available without changing its logits bitwise."""
    cache = SequenceCache(target.cache, BLOCK_SIZE)
    try:
        layers = target.layer_states.layers
        plain = target.forward(target.plan([SequenceRows(cache, [0])]))
        logits = target.forward(target.plan([SequenceRows(cache, [0], wants_states=True)]))
    except IncompatibleError:
        return FeatureShape()
    finally:
        cache.release()
    states = target.take_states()
    is_one_row_each = states is not None and len(states) == len(logits)
    if states is None or not is_one_row_each or not torch.equal(logits, plain):
        return FeatureShape()
    return FeatureShape(layers, states.shape[1])
