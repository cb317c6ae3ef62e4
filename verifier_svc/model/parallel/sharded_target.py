"""Tensor-parallel target: every rank runs every pass, by the plan made on rank 0.

A rank's attention and KV cache cover its own heads only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from coppice.core.errors import IncompatibleError
from verifier_svc.engine.pass_plan import PassPlan
from verifier_svc.model.parallel.pass_message import PassStep
from verifier_svc.model.target_model import TargetModel


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among the `size` ranks of a target.

    `share` gives every rank the step of rank 0; others' arguments are ignored. `meet` returns once all have loaded
    their parts. `fail` gets the reason of a failed pass; on rank 0 it ends the process.
    """

    size: int
    share: Callable[[PassStep], PassStep]
    meet: Callable[[], None]
    fail: Callable[[str], None]


class ShardedTarget(TargetModel):
    """Loading and probing run on every rank in step; then rank 0 calls `forward`, and the others follow by `run`."""

    def __init__(self, *arguments: Any, ranks: Ranks, **settings: Any) -> None:
        """See `TargetModel`."""
        super().__init__(*arguments, **settings)
        self._ranks = ranks

    def can_split(self, plan: PassPlan) -> bool:
        """Never: every rank runs a pass as a whole."""
        return False

    def forward(self, plan: PassPlan) -> Tensor:
        """See `TargetModel`; logits are the same on every rank."""
        try:
            step = self._ranks.share(PassStep(plan, *self.cache.take_moves()))
            return self.run(step.plan, step.sources, step.destinations)
        except Exception as error:
            # Ranks at different layers would add unrelated parts, and moves may be incomplete on some.
            self._ranks.fail(f"a pass failed: {error}")
            raise


def refuse_uneven_heads(text_config: Any, size: int) -> None:
    """Raise IncompatibleError unless heads of each kind divide evenly among ranks."""
    heads = text_config.num_attention_heads
    kv_heads = getattr(text_config, "num_key_value_heads", None) or heads
    for kind, count in (("attention", heads), ("key/value", kv_heads)):
        if count % size:
            raise IncompatibleError(f"TENSOR_PARALLEL is {size}, but the target's {count} {kind} heads do not divide")
