"""Tokens committed by one sequence's rounds: the acceptance rule on a pass's logits, up to the output's end."""

from __future__ import annotations

from dataclasses import dataclass

from coppice.core.chance import Purpose, seeded_chance
from coppice.core.log_probs import TokenLogProbs
from coppice.core.sampling import SamplingParams, StoppingOptions
from coppice.core.tokenizer import TargetTokenizer
from coppice.core.tree import ROOT, TokenTree
from verifier_svc.model.target_model import TargetInfo
from verifier_svc.verify.acceptance import Acceptance, sample_and_follow
from verifier_svc.verify.log_probs import committed_log_probs
from verifier_svc.verify.output_end import FinishReason, OutputEnd, SequenceFinish
from verifier_svc.verify.sampler import Draws, Logits
from verifier_svc.verify.token_choice import Constraint, TokenChooser
from verifier_svc.verify.traversal import traverse

# Reasons that yield to a complete grammar.
_CUT = (FinishReason.LENGTH, FinishReason.CONTEXT_LENGTH)


@dataclass(frozen=True, slots=True)
class VerifiedRound:
    """Result of a round; `log_probs` are one per token if requested, `near_ties` counts near-tied choices."""

    accepted: Acceptance
    finish: SequenceFinish | None
    log_probs: tuple[TokenLogProbs, ...]
    near_ties: int


class RoundVerifier:
    """Verifies the rounds of one sequence, in order.

    With `traverses` drafts are sampled trees verified by traversal, otherwise sample-and-follow is used.
    `num_top_log_probs`: None for no log-probabilities, else those of committed tokens and of this many likeliest ones.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        stopping: StoppingOptions,
        info: TargetInfo,
        tokenizer: TargetTokenizer,
        *,
        prompt: tuple[int, ...],
        resumed: tuple[int, ...] = (),
        traverses: bool = False,
        num_top_log_probs: int | None = None,
    ) -> None:
        self._seed = sampling.seed
        self._traverses = traverses
        self._num_top_log_probs = num_top_log_probs
        self._end = OutputEnd(
            stopping,
            eos_token_ids=info.eos_token_ids,
            max_context_tokens=info.max_context_tokens,
            tokenizer=tokenizer,
            prompt=prompt,
            resumed=resumed,
        )
        self.chooser = TokenChooser(
            sampling,
            info.vocab_size,
            prompt=prompt,
            output=resumed,
            end_token_ids=self._end.end_token_ids,
            min_tokens=stopping.min_tokens,
            near_tie_gap=info.near_tie_gap,
        )

    @property
    def room(self) -> int:
        """Tokens that may still follow."""
        return self._end.room

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """EOS tokens of the model that end the output."""
        return self._end.eos_token_ids

    def constrain(self, constraint: Constraint) -> SequenceFinish | None:
        """Set the grammar before the first round; returns the finish if the output is complete already."""
        self.chooser.constraint = constraint
        return self._end_of_form()

    def allowed(self, tree: TokenTree) -> TokenTree:
        """Part of a tree under allowed tokens after the root: drafters do not know the grammar."""
        constraint = self.chooser.constraint
        if constraint is None:
            return tree
        kept: list[bool] = []
        for parent, token in zip(tree.parents, tree.token_ids, strict=True):
            kept.append(bool(constraint.allowed[token]) if parent == ROOT else kept[parent])
        return tree.select(node for node, is_kept in enumerate(kept) if is_kept)

    def pass_chooser(self, tree: TokenTree) -> TokenChooser | None:
        """Chooser for drawing a round's tokens within the pass; None if each draw depends on the token before it."""
        if self.chooser.constraint is not None or (self._traverses and len(tree) > 0):
            return None
        return self.chooser

    def keeps_logits(self, tree: TokenTree) -> bool:
        """Whether `verify` needs the rows' logits."""
        return self._num_top_log_probs is not None or self.pass_chooser(tree) is None

    def verify(self, tree: TokenTree, logits: Logits, base_length: int, draws: Draws | None = None) -> VerifiedRound:
        """Commit tokens after the first `base_length`, and add them to the output.

        Args:
            tree: the draft.
            logits: the root's and the tree's rows [at least 1 + nodes, vocab], if needed.
            base_length: tokens committed before.
            draws: tokens drawn from these rows by the pass [1 + nodes, 2]; without, tokens are drawn one by one.

        Raises:
            InvalidRequestError: no token may follow under the output's grammar.
        """
        finish: SequenceFinish | None = None

        drawn = None if draws is None else draws.tolist()

        def draw(node: int, depth: int) -> int:
            token: int
            if drawn is None:
                token = self.chooser.choose(logits[node - ROOT], base_length + depth)
            else:
                token, is_near_tie = drawn[node - ROOT]
                self.chooser.num_near_ties += is_near_tie
            self.chooser.push(token)
            return token

        def is_last(token: int) -> bool:
            nonlocal finish
            finish = self._end.push(token)
            if finish is None or finish.reason in _CUT:
                finish = self._end_of_form() or finish
            return finish is not None

        if self._traverses and len(tree) > 0:
            chance = seeded_chance(self._seed, base_length, Purpose.ACCEPTANCE)
            accepted = traverse(tree, logits, self.chooser, chance, is_last)
        else:
            accepted = sample_and_follow(tree, draw, is_last)
        num_top = self._num_top_log_probs
        log_probs = () if num_top is None else committed_log_probs(logits, accepted, num_top)
        return VerifiedRound(accepted, finish, log_probs, self.chooser.take_near_ties())

    def _end_of_form(self) -> SequenceFinish | None:
        constraint = self.chooser.constraint
        return SequenceFinish(FinishReason.STOP) if constraint is not None and constraint.is_complete else None
