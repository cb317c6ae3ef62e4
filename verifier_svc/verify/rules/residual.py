"""What the rejection rules share: the part of the target's law that a rejected draft leaves over."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from coppice.core.chance import Chance
from coppice.core.draft_distribution import DraftDistribution
from coppice.core.errors import InvalidTreeError
from coppice.core.sampled_tree import SampledTree
from verifier_svc.verify.acceptance import Acceptance

FloatArray = npt.NDArray[np.float64]
# The target's next-token probabilities [vocab] after a node, or after ROOT.
Target = Callable[[int], FloatArray]


def residual(law: FloatArray, draft: DraftDistribution, rate: float = 1.0) -> tuple[float, FloatArray]:
    """The mass of (rate * law - draft)+, and that law normalised.

    Where nothing is left over, the draft could not have been rejected. Rounding can lead there all the same, with a
    probability of rounding's size; the law then stays as it is.
    """
    left = rate * law
    left[draft.tokens] = np.maximum(left[draft.tokens] - draft.probabilities, 0.0)
    mass = float(left.sum())
    return (mass, left / mass) if mass > 0 else (0.0, law)


def ratio(law: FloatArray, draft: DraftDistribution, token: int, rate: float = 1.0) -> float:
    """min(1, rate * law / draft) at a token of the draft."""
    return min(1.0, rate * float(law[token]) / draft.probability(token))


def remaining_rate(mass: float, rate: float) -> float:
    """The acceptance rate of a sequence of `rate` once its next draft was rejected and left this mass over."""
    return mass / (mass + (1.0 - rate)) if mass > 0 else 0.0


def accept(tree: SampledTree, node: int, law: FloatArray, chance: Chance) -> Acceptance:
    """The path down to `node` and one more token, drawn from `law`."""
    nodes = tree.path(node)
    return Acceptance((*(tree.token_ids[step] for step in nodes), chance.choice(law)), nodes)


def check_chain(tree: SampledTree) -> None:
    """
    Raises:
        InvalidTreeError: the tree branches.
    """
    if not tree.is_chain:
        raise InvalidTreeError("this acceptance rule is for chains, and the tree branches")
