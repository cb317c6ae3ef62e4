"""In-pass re-draft: the target's own draft for the next round, from masks after the accepted path's end (SPACE).

The masks predict one position each: marginals, whose best tree is the draft. With a transition, a mask's score of a
token also depends on the preceding token, which masks could not attend to; for the first mask that is the round's own
token. The request's noise is added first, as drafters do. Re-drafts never affect tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coppice.core.sampling import SamplingParams
from coppice.core.tree import EMPTY_TREE, ROOT, TokenTree
from coppice.search.error_scales import ErrorScales, error_scales_at
from coppice.search.likeliest_tokens import FloatArray, top_children
from coppice.search.marginal_tree import marginal_tree
from coppice.search.transition_scores import TransitionScores
from coppice.search.transition_tree import transition_tree
from coppice.search.tree_limits import TreeLimits
from verifier_svc.engine.pass_plan import SequenceRows
from verifier_svc.extras.redraft.choice import choose_groups, num_worth_verifying
from verifier_svc.extras.redraft.groups import MaskGroup, MaskShape, masks_for
from verifier_svc.model.pass_curve import PassCurve
from verifier_svc.verify.acceptance import Acceptance
from verifier_svc.verify.sampler import Logits
from verifier_svc.verify.token_choice import TokenChooser

SOURCE = "redraft"
# Least mean gain of re-drafts in accepted tokens per round; below it, re-drafts pause for this many rounds.
_LEAST_GAIN = 0.2
_PAUSE = 32
# Weight of a round in the running means, and their initial values.
_MEAN_RATE = 0.1
_FIRST_GAIN = 1.0
_FIRST_HIT_RATE = 0.6
# Default without a measurement.
_USUAL_CURVE = PassCurve.line(0.06)


@dataclass(frozen=True, slots=True)
class RedraftSettings:
    """Re-drafting of a target: bounds of masks per round and of nodes per tree.

    `free_rows`: masks are computed only in passes of at most this many rows, masks included. `sigmas`: errors of the
    masks' log-probabilities. `transition`: additions to their scores by the preceding token; None if not trained.
    `min_probability`: least probability of a node's path; with 0 all nodes are verified whatever rows cost, and costs
    are not measured, so that verifiers can be compared. `curve`: pass duration by rows.
    """

    shape: MaskShape
    max_nodes: int
    free_rows: int
    sigmas: ErrorScales
    transition: TransitionScores | None = None
    min_probability: float = 0.02
    curve: PassCurve = _USUAL_CURVE


class Redrafter:
    """Re-drafts of one sequence, at most `max_nodes` nodes each; none without `settings`."""

    def __init__(self, settings: RedraftSettings | None, max_nodes: int, temperature: float) -> None:
        self._settings = settings if max_nodes > 0 else None
        self._max_nodes = max_nodes
        self._temperature = temperature
        self._pace = RedraftPace()
        # Of the last round that could have masks.
        self._num_masks = 0 if settings is None else settings.shape.num_masks

    @property
    def shape(self) -> MaskShape | None:
        """Bounds of masks of the coming round; None if it should have none."""
        return self._settings.shape if self._settings is not None and self._pace.pays else None

    @property
    def max_rows(self) -> int:
        """Largest number of mask rows of a round."""
        return self._settings.shape.max_rows if self._settings is not None else 0

    def groups(self, tree: TokenTree, max_masks: int, room: int) -> tuple[MaskGroup, ...]:
        """Masks of a round that verifies `tree`, at most `max_masks`; the output may have `room` more tokens."""
        if not max_masks or self._settings is None:
            return ()
        settings = self._settings
        groups = choose_groups(
            tree,
            settings.shape,
            max_masks,
            room,
            self._pace.hit_rate,
            curve=settings.curve,
            rate=self._rate(1 + len(tree)),
        )
        self._num_masks = sum([group.num_masks for group in groups])
        return groups

    def worth_verifying(self, tree: TokenTree) -> TokenTree:
        """Part of a re-draft worth verifying, together with as many masks as in the last round."""
        if self._settings is None or not self._settings.min_probability:
            return tree
        rate = self._rate(1 + len(tree) + self._num_masks)
        num_worth = num_worth_verifying(tree.path_log_probs, self._num_masks, curve=self._settings.curve, rate=rate)
        if not num_worth and len(tree):
            # Without verification there is no gain.
            self._pace.verified(0)
        return tree.prune(num_worth)

    def _rate(self, rows: int) -> float:
        """Tokens per duration of the smallest pass, at passes of `rows` rows; at least plain decoding's 1."""
        if self._settings is None:
            return 1.0
        return max(1.0, self._pace.tokens_per_round / self._settings.curve.at(rows))

    def round_over(
        self,
        rows: SequenceRows,
        accepted: Acceptance,
        logits: Logits,
        chooser: TokenChooser,
        position: int,
        *,
        verified: bool,
    ) -> TokenTree:
        """Re-draft for the next round, from the masks after the accepted path's end; empty without masks there.

        Args:
            rows: of the round.
            accepted: outcome of the round.
            logits: [1 + nodes + masks, vocab].
            chooser: of the sequence, with the accepted tokens.
            position: of the next token.
            verified: whether the round's draft was a re-draft.
        """
        if self._settings is None:
            return EMPTY_TREE
        if verified:
            self._pace.verified(len(accepted.nodes))
        elif not rows.masks:
            self._pace.round_over()
        end = accepted.nodes[-1] if accepted.nodes else ROOT
        found, places = masks_for(rows.masks, rows.tree, end)
        if not found:
            return EMPTY_TREE
        first = 1 + len(rows.tree)
        scores = chooser.guess_scores(logits[[first + row for row in found]], position)
        tree = redraft_tree(scores, places, accepted.token_ids[-1], self._settings, self._temperature, self._max_nodes)
        if not len(tree):
            # An empty re-draft has no gain.
            self._pace.verified(0)
        return tree


def redraft_tree(
    scores: FloatArray,
    places: Sequence[int],
    last_token: int,
    settings: RedraftSettings,
    temperature: float,
    max_nodes: int,
) -> TokenTree:
    """The best tree of at most `max_nodes` nodes.

    Args:
        scores: of all tokens at each depth, with the request's noise [depths, vocab].
        places: positions of their masks in groups [depths]; higher ones are less accurate.
        last_token: the last committed one.
        settings: of the target.
        temperature: of the request.
        max_nodes: bound of the request.
    """
    sigmas = error_scales_at(settings.sigmas, temperature, 1 + max(places))[list(places)]
    nodes = max(1, min(max_nodes, settings.max_nodes))
    least = math.log(settings.min_probability) if settings.min_probability > 0 else -math.inf
    limits = TreeLimits(nodes, max_depth=len(scores), min_path_log_prob=least)
    if (transition := settings.transition) is None:
        marginals = [
            children
            for row, sigma in zip(scores, sigmas, strict=True)
            for children in top_children(row[None], sigma, nodes)
        ]
        return marginal_tree(marginals, limits, SOURCE)
    return transition_tree(last_token, transition, scores, sigmas, limits, nodes, SOURCE)


def warm_up(settings: RedraftSettings, vocab_size: int) -> None:
    """Make an empty re-draft, so that no round waits for compilation."""
    redrafter = Redrafter(settings, settings.max_nodes, temperature=1.0)
    redrafter.groups(EMPTY_TREE, settings.shape.max_rows, settings.shape.max_rows)
    logits = np.zeros((settings.shape.num_masks, vocab_size), np.float32)
    for sampling in (SamplingParams(), SamplingParams(temperature=1.0)):
        scores = TokenChooser(sampling, vocab_size, prompt=()).guess_scores(logits, 0)
        redraft_tree(scores, range(len(scores)), 0, settings, sampling.temperature, settings.max_nodes)


class RedraftPace:
    """Decides whether re-drafts of one sequence pay, so that a useless adapter soon costs next to nothing."""

    def __init__(self) -> None:
        self._gain = _FIRST_GAIN
        # Acceptance rate of a re-draft's first position.
        self.hit_rate = _FIRST_HIT_RATE
        self._pause = 0

    @property
    def pays(self) -> bool:
        """Whether the coming round should have masks."""
        return self._pause == 0

    @property
    def tokens_per_round(self) -> float:
        """Expected tokens of a round with a re-draft."""
        return 1 + self._gain

    def round_over(self) -> None:
        """Count a round without masks that could have had them."""
        self._pause = max(0, self._pause - 1)

    def verified(self, num_accepted: int) -> None:
        """Count a round that verified a re-draft."""
        self._gain += _MEAN_RATE * (num_accepted - self._gain)
        self.hit_rate += _MEAN_RATE * ((num_accepted > 0) - self.hit_rate)
        if self._gain < _LEAST_GAIN:
            self._pause = _PAUSE
