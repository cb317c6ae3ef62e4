"""Drafts of one request: its drafters' trees merged, pruned and sent to the verifier."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from coppice.core.denoising import LEFT_TO_DRAFTER, Denoising
from coppice.core.errors import InvalidTreeError
from coppice.core.sampling import SamplingParams
from coppice.core.tree import EMPTY_TREE, TokenTree
from coppice.v1 import sampling_pb2, tree_pb2
from coppice.wire.convert import samples_drafts
from orchestrator.peers.drafter_client import DrafterClient
from orchestrator.planner.base import RequestPlanner, RoundContext, RoundPlan
from orchestrator.prefix_cache.drafter import CacheDrafter
from orchestrator.prefix_cache.guesses import SOURCE
from orchestrator.request.ahead import AheadDrafting, ExpectedDraft, SendAhead, hung
from orchestrator.request.better_trees import AskTimes, BetterTrees
from orchestrator.request.drafter_set import DrafterSet
from orchestrator.request.merge import merge
from orchestrator.request.rounds import DraftOpening, Outcome, VerifierLoad
from orchestrator.request.source_records import SourceRecords
from orchestrator.request.statistics import Statistics
from orchestrator.request.transcript import Transcript

# Reasons for discarding a draft. Late: it left the committed path, none is wanted, it was sampled, or rounds are
# synchronous. Early: drafting ahead was not requested.
LEFT, UNWANTED, SAMPLED, MISSED, UNASKED = STALE = ("left", "unwanted", "sampled", "missed", "unasked")

# Called with base length, tree, node budget and, if changed, the linger in microseconds.
SendDraft = Callable[[int, TokenTree, int, int | None], None]

# Nodes sent to the verifier, in units of a round's budget: the surplus may serve the next round.
BUDGETS_SENT = 4


class Drafting:
    """Drives a request's drafts through its rounds.

    The verifier only waits while a draft may still come. Sampled trees come from one drafter and are forwarded whole
    and in time or not at all: selecting among their nodes would bias the output.

    `synchronous` rounds get one message: the merged drafts of all drafters asked, and the cache's; late drafts and
    drafts made ahead are dropped. Otherwise the first tree is sent at once, unless waiting for a better one pays
    (`better_trees.py`).
    """

    def __init__(
        self,
        clients: Sequence[DrafterClient],
        planner: RequestPlanner,
        transcript: Transcript,
        sampling: SamplingParams,
        requested_nodes: int | None,
        forced: bool,
        vocab_size: int,
        row_multiple: int = 1,
        acceptance: sampling_pb2.AcceptanceRule = sampling_pb2.ACCEPTANCE_RULE_SAMPLE_AND_FOLLOW,
        cache: CacheDrafter | None = None,
        request_id: str = "",
        cache_salt: str = "",
        synchronous: bool = False,
        max_redraft_nodes: int = 0,
        max_lookup_nodes: int = 0,
        max_head_nodes: int = 0,
        records: SourceRecords | None = None,
        denoising: Denoising = LEFT_TO_DRAFTER,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`records` are shared by requests of the same class (greedy or sampled)."""
        self.synchronous = synchronous
        self.request_id = request_id
        self._cache_salt = cache_salt
        self._denoising = denoising
        # Most nodes of an in-pass re-draft, and the re-draft for the current round.
        self.max_redraft_nodes = max_redraft_nodes
        # The same of the verifier's drafts by prompt lookup.
        self.max_lookup_nodes = max_lookup_nodes
        # The same of its drafts with a head.
        self.max_head_nodes = max_head_nodes
        self._redraft = EMPTY_TREE
        # Merged draft of the current round before any cut, and of the round before.
        self._offered = self.offered = EMPTY_TREE
        # Trace context for drafters' spans; empty without tracing.
        self.traceparent = ""
        self._cache = cache
        self._planner = planner
        self._transcript = transcript
        # Without the grammar, which drafters do not use and which may be long.
        self._sampling = sampling if sampling.grammar is None else replace(sampling, grammar=None)
        self._vocab_size = vocab_size
        self._acceptance = acceptance
        self._samples = samples_drafts(acceptance, sampling.temperature)
        # Sampled trees only fit the round they were made for, so they get the fixed plan.
        self._round_context = RoundContext(False, requested_nodes, forced or self._samples, row_multiple)
        self._send: SendDraft | None = None
        # State of the current round: trees by source, and trees sent to the verifier.
        self._trees: dict[str, TokenTree] = {}
        self._sent: list[TokenTree] = []
        # Whether drafters' trees were in time for the last round. At first a drafter may still be in prefill when the
        # verifier has long answered from its prefix cache.
        self._in_time = False
        self.ahead = AheadDrafting()
        self._told_linger_us = 0
        # Node budget sent last; 0 before the first.
        self._budget = 0
        # Current plan; whether and when drafters were asked for this round, and whether for the previous one.
        self._plan = RoundPlan(0, 0)
        self._asked = self._asked_before = False
        self._ask_times = AskTimes(clock)
        self._drafters = DrafterSet(clients, self, transcript, self._ask_times)
        self._better: BetterTrees | None = None
        if self._drafters.are_several and not self._serves_one_round:
            self._better = BetterTrees(records or SourceRecords(), self._give_up_waiting, clock)
        self.load = VerifierLoad()
        # Discarded drafts, by reason.
        self.stale: Counter[str] = Counter()

    @property
    def feature_size(self) -> int:
        """Size of the features that drafters need, in numbers per token (the same for all); 0 if none needs any."""
        return self._drafters.feature_size

    @property
    def max_prompt_features(self) -> int:
        """Most tokens of the prompt, the last ones, whose features any drafter reads."""
        return self._drafters.max_prompt_features

    @property
    def _serves_one_round(self) -> bool:
        """Whether a tree can only be used in the round it was made for."""
        return self._samples or self.synchronous

    @property
    def planned_nodes(self) -> int:
        """Node budget of the current round."""
        return self._plan.max_nodes

    @property
    def plan(self) -> RoundPlan:
        """Plan of the current round."""
        return self._plan

    @property
    def stale_drafts(self) -> int:
        """Number of discarded drafts."""
        return sum(self.stale.values())

    def open(self) -> None:
        """Plan the first round and, if it wants drafts, join the drafters."""
        self._replan()
        if self._plan.max_nodes:
            self._drafters.join(self._plan)

    def close(self, statistics: Statistics | None = None) -> None:
        """Release drafters, planner and verifier; the cache remembers the output if it has `statistics`."""
        self._send = None
        self.ahead.opened(None, 0)
        if self._better is not None:
            self._better.let_go()
        self._drafters.leave()
        self._planner.close()
        if self._cache is not None:
            self._cache.close(statistics, self._planner.gain)

    def opening_linger_us(self) -> int:
        """Linger in microseconds for the message that opens the sequence."""
        self._told_linger_us = self._plan.linger_us
        return self._told_linger_us

    def opened(self, send: SendDraft, verifier: str = "", send_ahead: SendAhead | None = None) -> None:
        """Attach to a verifier that has just opened the sequence; drafts made so far are sent to it."""
        self._send = send
        self._planner.runs_on(verifier)
        if self._sent:
            self._forward(self._sent[-1])
        self.ahead.opened(send_ahead, self._transcript.length)
        if self._cache is not None:
            self._cache.on_news = self._draft_alone
            self._cache.on_gain = self._planner.know
            self._cache.begin(is_wanted=self._plan.max_nodes > 0)
            self._draft_alone()

    def draft_opening(self) -> DraftOpening:
        """State of the request for a drafter that joins."""
        # The drafter that asks may be the only one.
        plan = self._replan(has_drafter=True)
        tokens = tuple(self._transcript.tokens)
        return DraftOpening(
            tokens,
            self._sampling,
            plan.max_nodes,
            self._acceptance,
            plan.row_multiple,
            self.request_id,
            self._cache_salt,
            self.traceparent,
            self.synchronous,
            self._denoising,
        )

    def round_done(self, outcome: Outcome) -> list[TokenTree]:
        """Report a round's commit to the drafters; returns the trees that had been sent for that round."""
        if self._transcript.room == 1:
            # The next pass commits the last token by itself: no draft fits.
            sent = self.round_ended(outcome)
            if self._told_linger_us:
                self._forward(EMPTY_TREE)
            return sent
        asked = self._asked
        self._in_time = bool(self._trees)
        self._replan()
        self._drafters.tell(outcome, self._plan)
        ahead = self.ahead.following(outcome.token_ids)
        before = self._sent
        # Trees that were held back for a better one: the round started without them.
        kept = dict(self._trees) if self._better is not None and self._better.are_awaited else {}
        sent = self.round_ended(outcome)
        self._asked_before = asked
        # The verifier keeps the same candidates: the subtree after the outcome of any tree sent, or the drafts made
        # ahead. Its outcome identifies the tree only by its size, so all are kept, the best one last.
        trees = () if self._serves_one_round else before if sent is before else (*before, *sent)
        left = [tree.descend(outcome.token_ids) for tree in trees]
        self._sent += sorted(filter(len, (ahead, *left)), key=lambda tree: tree.expected_tokens)
        if kept:
            self._planner.tree_arrived()
        for source, tree in kept.items():
            self._on_late_tree(source, outcome.base_length, tree)
        self._sync_linger()
        return sent

    def show_prompt(self, first_token: int, features: bytes) -> None:
        """Pass features of the prompt's tokens from `first_token` on to the drafters."""
        self._drafters.show_prompt(first_token, features)

    def round_passed(self, outcome: Outcome) -> None:
        """Update the cache, after everything on the round's critical path."""
        if self._cache is not None:
            self._cache.commit(outcome.token_ids, is_wanted=self._plan.max_nodes > 0)
            self._draft_alone()

    def learn(self, outcome: Outcome, sent: list[TokenTree]) -> None:
        """Train the planner on the round."""
        self._planner.round_over(outcome, sent, self._asked_before)

    def round_ended(self, outcome: Outcome) -> list[TokenTree]:
        """Clear the round's trees; returns those that may have been verified: the sent ones, or the re-draft."""
        self._asked_before = self._asked
        if self._better is not None:
            self._better.let_go()
            self._better.committed(len(outcome.token_ids), self._transcript.tokens)
        sent, self._sent = self._sent, []
        self.offered, self._offered = self._offered, EMPTY_TREE
        self._trees.clear()
        self.ahead.round_ended()
        redraft, self._redraft = self._redraft, outcome.redraft
        return [redraft] if outcome.draft_origin == tree_pb2.DRAFT_ORIGIN_REDRAFT else sent

    def on_tree(self, source: str, base_length: int, assumed: tuple[int, ...], tree: TokenTree) -> None:
        """Forward a drafter's tree if it follows the committed tokens.

        Raises:
            InvalidTreeError: a token is outside the vocabulary, or a tree that must be sampled is not.
        """
        _check_draft(tree, self._vocab_size, is_sampled=self._samples)
        took_s = self._ask_times.elapsed_s(base_length)
        self._drafters.tree_arrived(source)
        if self._better is not None and not assumed:
            self._better.came(source, base_length, tree, took_s, self._transcript.length)
        if not self._is_current(base_length, assumed):
            self._planner.tree_arrived()
            if assumed:
                tree = hung([ExpectedDraft(assumed, 0.0, tree)], source)
            self._on_late_tree(source, base_length, tree)
            return
        self._trees[source] = tree.labelled(source)
        if len(tree) and self._awaits_better(took_s):
            return
        self._planner.tree_arrived()
        if (self.synchronous or not len(tree)) and len(self._trees) < len(self._drafters.asked):
            # Another drafter's tree may still come.
            return
        self._send_drafted()

    def _awaits_better(self, took_s: float | None) -> bool:
        """Whether to hold the trees back for a better one; never once a tree was sent."""
        if self._better is None or (len(self._trees) > 1 and not self._better.are_awaited):
            return False
        linger_s = self._plan.linger_us / 1e6
        return self._better.await_for(self._trees, self._drafters.asked, took_s, linger_s, self.load.batch_size)

    def _give_up_waiting(self) -> None:
        """Send the trees at hand: the better one did not come in time."""
        self._planner.tree_arrived()
        self._send_drafted()

    def _send_drafted(self) -> None:
        """Send the merged trees of the round."""
        if self._better is not None:
            self._better.let_go()
        drafted = merge(list(self._trees.values()))
        if self._cache is not None:
            plan = self._plan
            addition = self._cache.draft_with(
                drafted, plan.max_nodes, self.load.batch_size, plan.row_price, plan.row_multiple
            )
            drafted = merge([drafted, addition])
        if len(drafted) and len(self._redraft):
            # Unmerged, the re-draft is already at the verifier.
            drafted = merge([drafted, self._redraft])
        self._offered = drafted
        best = drafted.up_to_depth(self._transcript.room - 1)
        if not self._samples:
            # Prune nodes that no later round could use.
            budgets = 1 if self.synchronous else BUDGETS_SENT
            best = self._planner.select(best.prune(budgets * self._plan.max_nodes))
        self._sent.append(best)
        self._forward(best)
        if not self._serves_one_round and self._plan.max_nodes and self._transcript.room > 1:
            # The drafters that have answered are idle.
            idle = self._drafters.of_kinds(self._trees)
            self.ahead.expect(idle, self._transcript.length, best.prune(self._plan.max_nodes))

    def on_ahead(self, source: str, base_length: int, drafts: Sequence[ExpectedDraft]) -> None:
        """Forward trees after likely outcomes; raises InvalidTreeError for tokens outside the vocabulary."""
        _check_ahead(drafts, self._vocab_size)
        if base_length != self._transcript.length or self._serves_one_round or not self._plan.max_nodes:
            self._on_late_tree(source, base_length, self.ahead.late(base_length, drafts, source))
        elif not self.ahead.add(base_length, drafts, source):
            self.stale[UNASKED] += 1

    def _draft_alone(self) -> None:
        """Send the cache's tree if no drafter's may come in time; otherwise it is merged with the drafter's."""
        plan = self._plan
        if self._cache is None or self._send is None or not plan.max_nodes:
            return
        nodes, batch_size = BUDGETS_SENT * plan.max_nodes, self.load.batch_size
        if self.synchronous and (self._drafters.asked or self._sent):
            return
        if not self._drafters.asked:
            tree = self._cache.draft(nodes, batch_size, plan.row_price)
        elif self._in_time or self._has_drafters_tree():
            return
        else:
            tree = self._cache.draft_before(nodes, batch_size, plan.row_price)
        if len(tree) and len(self._redraft):
            tree = merge([tree, self._redraft])
        self._offered = tree
        tree = self._planner.select(tree.up_to_depth(self._transcript.room - 1))
        # A synchronous round waits for this message even if the tree is empty.
        if self.synchronous or (len(tree) and (not self._sent or tree != self._sent[-1])):
            self._sent.append(tree)
            self._forward(tree)

    def _has_drafters_tree(self) -> bool:
        """Whether the tree at hand for the round has nodes of drafters."""
        return bool(self._sent) and self._sent[-1].source_names != (SOURCE,)

    def _on_late_tree(self, source: str, base_length: int, tree: TokenTree) -> None:
        """Forward a late tree unless the committed tokens left it: the verifier re-roots it."""
        if self._serves_one_round or not self._plan.max_nodes:
            self.stale[SAMPLED if self._samples else MISSED if self.synchronous else UNWANTED] += 1
            return
        left = tree.descend(self._transcript.tokens[base_length:])
        if base_length >= self._transcript.length or not len(left) or self._send is None:
            self.stale[LEFT] += 1
            return
        if not self._trees:
            self._sent.append(left.labelled(source))
        self._send(base_length, tree, self._plan.max_nodes, None)

    def on_drafters_changed(self) -> None:
        """Replan, and adjust whether the verifier waits."""
        self._replan()
        if self.synchronous and self._trees and not self._sent and len(self._trees) >= len(self._drafters.asked):
            # The round only waited for the drafter that is gone.
            self._send_drafted()
        elif self.synchronous:
            self._draft_alone()
        self._sync_linger()

    def on_drafter_replaced(self, gone: DrafterClient, other: DrafterClient) -> None:
        """Move the request to another drafter of the same kind."""
        self._drafters.replace(gone, other)
        self._sync_linger()

    def _is_current(self, base_length: int, assumed: tuple[int, ...]) -> bool:
        tokens = self._transcript.tokens
        return base_length + len(assumed) == len(tokens) and (not assumed or tuple(tokens[base_length:]) == assumed)

    def _replan(self, has_drafter: bool = False) -> RoundPlan:
        has_drafter = has_drafter or self._drafters.has_any
        may_draft = has_drafter or (self.synchronous and self._cache is not None)
        round_context, choice = self._round_context, self._drafters.choice
        if round_context.has_drafter != may_draft or round_context.sources != choice:
            # Rarely differs from the previous round, so the object is reused.
            round_context = self._round_context = round_context._replace(has_drafter=may_draft, sources=choice)
        self._plan = self._planner.plan(round_context, self.load)
        self._asked = has_drafter and self._plan.max_nodes > 0
        return self._plan

    def _sync_linger(self) -> None:
        """Tell the verifier at once whether to wait; the exact linger goes with the next tree."""
        if bool(self._plan.linger_us) != bool(self._told_linger_us):
            # Repeat the round's tree: an empty draft would replace it.
            self._forward(self._sent[-1] if self._sent else EMPTY_TREE)

    def _forward(self, tree: TokenTree) -> None:
        if self._send is None:
            return
        linger_us = self._plan.linger_us
        changed = linger_us if linger_us != self._told_linger_us else None
        self._told_linger_us = linger_us
        # Without a plan to draft, a leftover tree keeps the last budget: 0 would leave the budget to the verifier.
        self._budget = self._plan.max_nodes or self._budget
        self._send(self._transcript.length, tree, self._budget, changed)


def _check_draft(tree: TokenTree, vocab_size: int, *, is_sampled: bool) -> None:
    """Raise InvalidTreeError if a token is outside the vocabulary, or a tree that must be sampled is not."""
    named = [tree.token_ids]
    if is_sampled:
        if len(tree) and not tree.distributions:
            raise InvalidTreeError("traversal verification needs the distributions that the tree was drawn from")
        named += [distribution.token_ids for distribution in tree.distributions if distribution is not None]
    _check_tokens(named, vocab_size)


def _check_ahead(drafts: Sequence[ExpectedDraft], vocab_size: int) -> None:
    """Raise InvalidTreeError if a token is outside the vocabulary."""
    _check_tokens([draft.token_ids for draft in drafts], vocab_size)


def _check_tokens(named: Sequence[Sequence[int]], vocab_size: int) -> None:
    if any(max(token_ids, default=0) >= vocab_size for token_ids in named):
        raise InvalidTreeError(f"a token id is outside the vocabulary of {vocab_size}")
