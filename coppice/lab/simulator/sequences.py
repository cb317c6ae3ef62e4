"""A running sequence as the verifier sees it. Its mailbox and its patience are the verifier's own code."""

from __future__ import annotations

from collections.abc import Callable

from coppice.core.tree import EMPTY_TREE, ROOT, TokenTree
from coppice.lab.simulator.profile import Text
from orchestrator.request.rounds import Outcome
from verifier_svc.engine.draft_counts import DraftOrigin
from verifier_svc.engine.linger import Linger
from verifier_svc.engine.mailbox import Mailbox
from verifier_svc.engine.round_start import RoundPromise, has_draft_to_start_with
from verifier_svc.stream.responses import DRAFT_ORIGINS

OnRound = Callable[[Outcome], None]


class SimulatedSequence:
    """The part of `verifier_svc/engine/sequence.py` that time depends on. `on_round` takes each round's result."""

    # Sampled trees are not simulated.
    traverses = False

    def __init__(
        self, text: Text, num_prompt: int, max_tokens: int, max_nodes: int, linger_s: float, on_round: OnRound
    ) -> None:
        self.text = text
        self.tokens = [0] * num_prompt
        self.on_round = on_round
        self.mailbox = Mailbox()
        self.linger = Linger(linger_s)
        self.last_outcome_s = 0.0
        self._num_prompt = num_prompt
        self._max_length = num_prompt + max_tokens
        self._max_nodes = self._budget = max_nodes
        self._num_computed = 0
        self._num_rounds = 0
        self._usual_promise = RoundPromise()
        self._tree = EMPTY_TREE
        self._is_drafted = False
        self._origin: DraftOrigin | None = None

    @property
    def num_pending(self) -> int:
        """Committed tokens that no pass has computed."""
        return len(self.tokens) - self._num_computed

    @property
    def is_prefilling(self) -> bool:
        """Whether no token has been generated."""
        return self._num_rounds == 0

    @property
    def num_nodes(self) -> int:
        """Nodes that the coming round verifies at most."""
        tree = self.mailbox.tree
        return 0 if tree is None else min(len(tree), self._budget)

    @property
    def node_log_probs(self) -> list[float]:
        """Path log-probabilities of the nodes that the coming round verifies at most, the likeliest first."""
        return sorted((self.mailbox.tree or EMPTY_TREE).path_log_probs, reverse=True)[: self.num_nodes]

    @property
    def has_draft(self) -> bool:
        """Whether the coming round has a draft that is worth starting with at once."""
        room = self._max_length - len(self.tokens)
        return has_draft_to_start_with(self.mailbox, self._budget, self._usual_promise, room)

    @property
    def may_linger(self) -> bool:
        """Whether the coming round may wait for its draft. Prompts never wait."""
        return not self.is_prefilling and self.linger.wait_s() > 0

    @property
    def deadline_s(self) -> float:
        """When the coming round starts at the latest."""
        return self.last_outcome_s + (self.linger.wait_s() if self.may_linger else 0.0)

    @property
    def is_complete(self) -> bool:
        return len(self.tokens) >= self._max_length

    def submit(self, base_length: int, tree: TokenTree, budget: int, linger_s: float | None) -> None:
        if linger_s is not None:
            self.linger.limit_s = linger_s
        self._budget = min(budget, self._max_nodes) if budget else self._max_nodes
        self._usual_promise.add(tree, self._budget)
        self.mailbox.put(base_length, tree, self.tokens)

    def begin_pass(self, num_pending: int, max_nodes: int) -> int:
        """The rows that the sequence brings to a pass, which ends a round where these are all its pending tokens."""
        if num_pending < self.num_pending:
            self._tree, self._origin = EMPTY_TREE, None
            return num_pending
        room = self._max_length - len(self.tokens)
        draft = (self.mailbox.tree or EMPTY_TREE).up_to_depth(room - 1).prune(self._budget)
        self._tree = draft.prune(max_nodes)
        self._is_drafted = len(draft) > 0
        self._origin = self.mailbox.origin if len(self._tree) else None
        return num_pending + len(self._tree)

    def end_pass(self, num_pending: int, now_s: float, waited_s: float, rows: int, pass_s: float) -> Outcome | None:
        """Commit what the pass came to; None when it was a part of the prompt."""
        self._num_computed += num_pending
        if self.num_pending:
            return None
        base, tree = len(self.tokens), self._tree
        first = base - self._num_prompt
        accepted = num_followed(tree, self.text.said(first, first + tree.depth))
        committed = self.text.said(first, first + accepted + 1)
        self.tokens += committed
        self._num_computed += accepted
        # As at the verifier, the prompt's round waits for no draft.
        if self._num_rounds > 0:
            self.linger.round_over(drafted=self._is_drafted)
        self._num_rounds += 1
        self.mailbox.advance(committed, self.tokens)
        self.last_outcome_s = now_s
        return Outcome(
            base_length=base,
            token_ids=tuple(committed),
            num_accepted=accepted,
            draft_nodes=len(tree),
            draft_depth=tree.depth,
            redraft_nodes=0,
            features=b"",
            pass_rows=rows,
            pass_us=round(1e6 * pass_s),
            linger_us=round(1e6 * waited_s),
            stale_drafts=0,
            draft_origin=DRAFT_ORIGINS[self._origin],
        )


def num_followed(tree: TokenTree, said: list[int]) -> int:
    """How many nodes of a tree, from its root down, are what was said."""
    node, followed = ROOT, 0
    for token in said:
        child = tree.children.get((node, token))
        if child is None:
            break
        node, followed = child, followed + 1
    return followed
