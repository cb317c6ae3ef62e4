"""A target of which this process holds a part: every rank runs every pass, over the plan that rank 0 made.

A rank's attention sees its own heads only, so its keys and values are those heads' and nothing else has to know.
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
    """This process among `size` that hold the target together.

    `share` gives every rank the step that rank 0 brings; what others bring is ignored. `meet` returns when all have
    loaded their parts. `fail` is told why a pass broke off; on rank 0 it ends the process.
    """

    size: int
    share: Callable[[PassStep], PassStep]
    meet: Callable[[], None]
    fail: Callable[[str], None]


class ShardedTarget(TargetModel):
    """Loading and probing run on every rank in step; later rank 0 calls `forward`, and the others follow by `run`."""

    def __init__(self, *arguments: Any, ranks: Ranks, **settings: Any) -> None:
        """As `TargetModel` has it."""
        super().__init__(*arguments, **settings)
        self._ranks = ranks

    def can_split(self, plan: PassPlan) -> bool:
        """No pass gives its logits in blocks: every rank runs the whole of it in one go."""
        return False

    def forward(self, plan: PassPlan) -> Tensor:
        """As `TargetModel` has it; logits are the same on every rank."""
        try:
            step = self._ranks.share(PassStep(plan, *self.cache.take_moves()))
            return self.run(step.plan, step.sources, step.destinations)
        except Exception as error:
            # Ranks that are not at the same layer would add up parts that do not belong together, and whether all of
            # them have moved what was to move nobody knows.
            self._ranks.fail(f"a pass failed: {error}")
            raise


def refuse_uneven_heads(text_config: Any, size: int) -> None:
    """Raise IncompatibleError unless every rank gets the same number of whole heads of each kind."""
    heads = text_config.num_attention_heads
    kv_heads = getattr(text_config, "num_key_value_heads", None) or heads
    for kind, count in (("attention", heads), ("key/value", kv_heads)):
        if count % size:
            raise IncompatibleError(f"TENSOR_PARALLEL is {size}, but the target's {count} {kind} heads do not divide")
