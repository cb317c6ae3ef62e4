"""Features: the target's last hidden state of the row that each committed token was drawn from, as in EAGLE.

Known in the pass that commits the tokens. In bfloat16, for drafters that request them; they are hints.
"""

from __future__ import annotations

import torch

from coppice.core.errors import IncompatibleError
from coppice.core.tree import ROOT
from verifier_svc.engine.kv_cache import BLOCK_SIZE, HalfArray, SequenceCache
from verifier_svc.engine.pass_plan import SequenceRows
from verifier_svc.model.target_model import TargetModel
from verifier_svc.verify.acceptance import Acceptance


def committed_features(states: HalfArray, accepted: Acceptance) -> bytes:
    """Row-major [tokens, hidden]. `states` [1 + nodes, hidden] are the root's and the tree's rows."""
    return states[[node - ROOT for node in accepted.drawn_behind]].tobytes()


def feature_size(target: TargetModel) -> int:
    """Width of a target's features; 0 if they are not available without changing its logits bitwise."""
    cache = SequenceCache(target.cache, BLOCK_SIZE)
    try:
        plain = target.forward(target.plan([SequenceRows(cache, [0])]))
        logits = target.forward(target.plan([SequenceRows(cache, [0], wants_states=True)]))
    except IncompatibleError:
        return 0
    finally:
        cache.release()
    states = target.take_states()
    is_one_row_each = states is not None and len(states) == len(logits)
    return states.shape[1] if states is not None and is_one_row_each and torch.equal(logits, plain) else 0
