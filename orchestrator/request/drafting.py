"""One request's drafts: its drafters' trees for the committed length, merged, pruned and sent to the verifier."""

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
from orchestrator.planner.base import RequestPlanner, RoundContext, RoundPlan, VerifierLoad
from orchestrator.planner.better_trees import BetterTrees
from orchestrator.planner.draft_times import AskTimes
from orchestrator.planner.source_records import SourceRecords
from orchestrator.prefix_cache.drafter import CacheDrafter
from orchestrator.prefix_cache.guesses import SOURCE
from orchestrator.request.ahead import AheadDrafting, ExpectedDraft, SendAhead, hung
from orchestrator.request.drafter_set import DrafterSet
from orchestrator.request.merge import labelled, merge
from orchestrator.request.rounds import DraftOpening, Outcome
from orchestrator.request.statistics import Statistics
from orchestrator.request.transcript import Transcript

# Why a draft is of no use. One comes late: the committed tokens have left it, none is wanted, it was sampled, or rounds
# are synchronous. One comes early: nobody was told to draft ahead.
LEFT, UNWANTED, SAMPLED, MISSED, UNASKED = STALE = ("left", "unwanted", "sampled", "missed", "unasked")

# Base length, tree, budget and, when it changes, the linger in microseconds.
SendDraft = Callable[[int, TokenTree, int, int | None], None]

# Nodes sent to the verifier, in units of a round's budget: what a round leaves over may serve the next.
BUDGETS_SENT = 4


class Drafting:
    """Follows one request through its rounds on behalf of its drafters.

    Whatever the drafters do, the verifier is told to wait only while a tree may still come. Sampled trees come from one
    drafter and are passed on whole and in time or not at all: any choice among their nodes would bias the output.

    With `synchronous` rounds the verifier has one message per round: what all drafters that were asked have to say, and
    the cache with them. Nothing goes ahead of that, and nothing that is late is passed on.

    Else the first tree is sent at once, unless it pays to wait for a better one (`better_trees.py`).
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
        records: SourceRecords | None = None,
        denoising: Denoising = LEFT_TO_DRAFTER,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`records` are shared by requests that are alike."""
        self.synchronous = synchronous
        self.request_id = request_id
        self._cache_salt = cache_salt
        self._denoising = denoising
        # Nodes of the target's own draft that a round may have at most, and its draft for the current round.
        self.max_redraft_nodes = max_redraft_nodes
        self._redraft = EMPTY_TREE
        # The span that drafters' sequences belong to; empty where nobody traces.
        self.traceparent = ""
        self._cache = cache
        self._planner = planner
        self._transcript = transcript
        # Drafters do not read the grammar, whose text may be long.
        self._sampling = sampling if sampling.grammar is None else replace(sampling, grammar=None)
        self._vocab_size = vocab_size
        self._acceptance = acceptance
        self._samples = samples_drafts(acceptance, sampling.temperature)
        # Sampled trees serve the very round that they were made for or none: they get the fixed plan.
        self._round_context = RoundContext(False, requested_nodes, forced or self._samples, row_multiple)
        self._send: SendDraft | None = None
        # Of the current round: each source's tree, and what the verifier was sent.
        self._trees: dict[str, TokenTree] = {}
        self._sent: list[TokenTree] = []
        # Whether drafters' trees came before the last round was over. A drafter may still be reading the prompt when
        # the verifier, which has seen its beginning before, is long done with it.
        self._in_time = False
        self.ahead = AheadDrafting()
        self._told_linger_us = 0
        # Most nodes of a round, as the verifier was told last; 0 before it was.
        self._budget = 0
        # The round's plan, and whether and when drafters were asked for it, and whether for the one before.
        self._plan = RoundPlan(0, 0)
        self._asked = self._asked_before = False
        self._ask_times = AskTimes(clock)
        self._drafters = DrafterSet(clients, self, transcript, self._ask_times)
        self._better: BetterTrees | None = None
        if self._drafters.are_several and not self._serves_one_round:
            self._better = BetterTrees(records or SourceRecords(), self._give_up_waiting, clock)
        self.load = VerifierLoad()
        # Drafts that came when they were of no use any more, by reason.
        self.stale: Counter[str] = Counter()

    @property
    def feature_size(self) -> int:
        """Numbers of the features that a drafter needs, which is the same for all; 0 where none needs any."""
        return self._drafters.feature_size

    @property
    def _serves_one_round(self) -> bool:
        """Whether a tree is of use in the very round that it was made for, and in no other."""
        return self._samples or self.synchronous

    @property
    def planned_nodes(self) -> int:
        """Nodes that the current round may verify."""
        return self._plan.max_nodes

    @property
    def stale_drafts(self) -> int:
        """All drafts that came when they were of no use any more."""
        return sum(self.stale.values())

    def open(self) -> None:
        """Plan the first round, and ask every drafter to follow the request, if it wants a draft."""
        self._replan()
        if self._plan.max_nodes:
            self._drafters.join(self._plan)

    def close(self, statistics: Statistics | None = None) -> None:
        """Let go of drafters, planner and verifier; an output that has `statistics` is remembered."""
        self._send = None
        self.ahead.opened(None, 0)
        self._planner.close()
        if self._cache is not None:
            self._cache.close(statistics, self._planner.gain)
        if self._better is not None:
            self._better.let_go()
        self._drafters.leave()

    def opening_linger_us(self) -> int:
        """The linger that the verifier is told as the sequence opens."""
        self._told_linger_us = self._plan.linger_us
        return self._told_linger_us

    def opened(self, send: SendDraft, verifier: str = "", send_ahead: SendAhead | None = None) -> None:
        """A verifier has the sequence now, and only that; trees that are there already are sent again."""
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
        """The request as a drafter that begins to follow it has to know it."""
        # The drafter that asks may be the first.
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
        """Tell the drafters what was committed; returns the trees that had been sent for that round."""
        if self._transcript.room == 1:
            # The pass itself fills the last place, so there is nothing to draft and nothing to wait for.
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
        # The round began without them.
        kept = dict(self._trees) if self._better is not None and self._better.are_awaited else {}
        sent = self.round_ended(outcome)
        self._asked_before = asked
        # The verifier does the same: the part of a tree after the outcome may be verified next, or what was drafted
        # ahead for it. Which tree it took only the number of nodes tells, so that all are kept, the best one last.
        trees = () if self._serves_one_round else before if sent is before else (*before, *sent)
        left = [tree.descend(outcome.token_ids) for tree in trees]
        self._sent += sorted(filter(len, (ahead, *left)), key=lambda tree: tree.expected_tokens)
        if kept:
            self._planner.tree_arrived(self._ask_times.first_took_s(outcome.base_length))
        for source, tree in kept.items():
            self._on_late_tree(source, outcome.base_length, tree)
        self._sync_linger()
        return sent

    def round_passed(self, outcome: Outcome) -> None:
        """Let the cache see what was committed, now that everyone who waits for it has it."""
        if self._cache is not None:
            self._cache.commit(outcome.token_ids, is_wanted=self._plan.max_nodes > 0)
            self._draft_alone()

    def learn(self, outcome: Outcome, sent: list[TokenTree]) -> None:
        """Let the planner learn from the round that is over now."""
        self._planner.round_over(outcome, sent, self._asked_before)

    def round_ended(self, outcome: Outcome) -> list[TokenTree]:
        """Forget the round's trees; returns those that the verifier may have taken: what it was sent, or its own."""
        self._asked_before = self._asked
        if self._better is not None:
            self._better.let_go()
            self._better.committed(len(outcome.token_ids), self._transcript.tokens)
        sent, self._sent = self._sent, []
        self._trees.clear()
        self.ahead.round_ended()
        redraft, self._redraft = self._redraft, outcome.redraft
        return [redraft] if outcome.draft_origin == tree_pb2.DRAFT_ORIGIN_REDRAFT else sent

    def on_tree(self, source: str, base_length: int, assumed: tuple[int, ...], tree: TokenTree) -> None:
        """Use a drafter's tree if it follows the committed tokens.

        Raises:
            InvalidTreeError: a token is not in the target's vocabulary, or the tree had to be sampled and is not.
        """
        _check_draft(tree, self._vocab_size, is_sampled=self._samples)
        took_s = self._ask_times.elapsed_s(base_length)
        if self._better is not None and not assumed:
            self._better.came(source, base_length, tree, took_s, self._transcript.length)
        if not self._is_current(base_length, assumed):
            self._planner.tree_arrived(self._ask_times.first_took_s(base_length))
            if assumed:
                tree = hung([ExpectedDraft(assumed, 0.0, tree)], source)
            self._on_late_tree(source, base_length, tree)
            return
        self._trees[source] = labelled(tree, source)
        if len(tree) and self._awaits_better(took_s):
            return
        self._planner.tree_arrived(self._ask_times.first_took_s(base_length))
        if (self.synchronous or not len(tree)) and len(self._trees) < len(self._drafters.asked):
            # Another one's may still come.
            return
        self._send_drafted()

    def _awaits_better(self, took_s: float | None) -> bool:
        """Whether the trees that are there wait for another one; none that comes after what was sent does."""
        if self._better is None or (len(self._trees) > 1 and not self._better.are_awaited):
            return False
        linger_s = self._plan.linger_us / 1e6
        return self._better.await_for(self._trees, self._drafters.asked, took_s, linger_s, self.load.batch_size)

    def _give_up_waiting(self) -> None:
        """Send what there is: the tree that was waited for has not come."""
        self._planner.tree_arrived(self._ask_times.first_took_s(self._transcript.length))
        self._send_drafted()

    def _send_drafted(self) -> None:
        """Send the round's trees, as one."""
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
            # Without nodes of others it is at the verifier already.
            drafted = merge([drafted, self._redraft])
        best = drafted.up_to_depth(self._transcript.room - 1)
        if not self._samples:
            # What no next round may use need not travel.
            budgets = 1 if self.synchronous else BUDGETS_SENT
            best = self._planner.select(best.prune(budgets * self._plan.max_nodes))
        self._sent.append(best)
        self._forward(best)
        if not self._serves_one_round and self._plan.max_nodes and self._transcript.room > 1:
            # Those that have drafted are idle now.
            idle = self._drafters.of_kinds(self._trees)
            self.ahead.expect(idle, self._transcript.length, best.prune(self._plan.max_nodes))

    def on_ahead(self, source: str, base_length: int, drafts: Sequence[ExpectedDraft]) -> None:
        """Pass trees after likely outcomes on; raises InvalidTreeError if a token is not in the vocabulary."""
        _check_ahead(drafts, self._vocab_size)
        if base_length != self._transcript.length or self._serves_one_round or not self._plan.max_nodes:
            self._on_late_tree(source, base_length, self.ahead.late(base_length, drafts, source))
        elif not self.ahead.add(base_length, drafts, source):
            self.stale[UNASKED] += 1

    def _draft_alone(self) -> None:
        """Send the cache's tree where no drafter's may follow in time; else it waits for that, to be merged with it."""
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
        tree = self._planner.select(tree.up_to_depth(self._transcript.room - 1))
        # A synchronous round waits for it, whatever there is.
        if self.synchronous or (len(tree) and (not self._sent or tree != self._sent[-1])):
            self._sent.append(tree)
            self._forward(tree)

    def _has_drafters_tree(self) -> bool:
        """Whether what was sent for the round, or left over for it, has drafters' nodes."""
        return bool(self._sent) and self._sent[-1].source_names != (SOURCE,)

    def _on_late_tree(self, source: str, base_length: int, tree: TokenTree) -> None:
        """Pass a tree on that tokens have been committed after, unless they left it: the verifier re-roots it."""
        if self._serves_one_round or not self._plan.max_nodes:
            self.stale[SAMPLED if self._samples else MISSED if self.synchronous else UNWANTED] += 1
            return
        left = tree.descend(self._transcript.tokens[base_length:])
        if base_length >= self._transcript.length or not len(left) or self._send is None:
            self.stale[LEFT] += 1
            return
        if not self._trees:
            self._sent.append(labelled(left, source))
        self._send(base_length, tree, self._plan.max_nodes, None)

    def on_drafters_changed(self) -> None:
        """Wait for drafts again, or no longer."""
        self._replan()
        if self.synchronous and self._trees and not self._sent and len(self._trees) >= len(self._drafters.asked):
            # They had waited for the one that is gone.
            self._send_drafted()
        elif self.synchronous:
            self._draft_alone()
        self._sync_linger()

    def on_drafter_replaced(self, gone: DrafterClient, other: DrafterClient) -> None:
        """Have another drafter of the same kind follow the request."""
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
            # Few rounds differ in it from the one before.
            round_context = self._round_context = round_context._replace(has_drafter=may_draft, sources=choice)
        self._plan = self._planner.plan(round_context, self.load)
        self._asked = has_drafter and self._plan.max_nodes > 0
        return self._plan

    def _sync_linger(self) -> None:
        """Tell the verifier at once whether to wait; how long exactly, it is told with the next tree."""
        if bool(self._plan.linger_us) != bool(self._told_linger_us):
            # With the tree that the round has, if any: a draft without one would replace it.
            self._forward(self._sent[-1] if self._sent else EMPTY_TREE)

    def _forward(self, tree: TokenTree) -> None:
        if self._send is None:
            return
        linger_us = self._plan.linger_us
        changed = linger_us if linger_us != self._told_linger_us else None
        self._told_linger_us = linger_us
        # What is left over for a round that asks for nothing is verified as far as the last plan went: a budget of 0
        # would leave that to the verifier.
        self._budget = self._plan.max_nodes or self._budget
        self._send(self._transcript.length, tree, self._budget, changed)


def _check_draft(tree: TokenTree, vocab_size: int, *, is_sampled: bool) -> None:
    """Raise InvalidTreeError: a token is not in the vocabulary, or the tree had to be sampled and is not."""
    named = [tree.token_ids]
    if is_sampled:
        if len(tree) and not tree.distributions:
            raise InvalidTreeError("traversal verification needs the distributions that the tree was drawn from")
        named += [distribution.token_ids for distribution in tree.distributions if distribution is not None]
    _check_tokens(named, vocab_size)


def _check_ahead(drafts: Sequence[ExpectedDraft], vocab_size: int) -> None:
    """Raise InvalidTreeError: a token is not in the vocabulary."""
    _check_tokens([draft.token_ids for draft in drafts], vocab_size)


def _check_tokens(named: Sequence[Sequence[int]], vocab_size: int) -> None:
    if any(max(token_ids, default=0) >= vocab_size for token_ids in named):
        raise InvalidTreeError(f"a token id is outside the vocabulary of {vocab_size}")
