"""Drafting ahead: trees after the likely outcomes of the round under way, sent to the verifier as one tree.

They are sent at once, under the base length of the round under way; the verifier keeps them with the round's draft and
has the next draft when the outcome is known. Sent after the outcome, they would arrive two messages later.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from coppice.core.errors import InvalidTreeError
from coppice.core.tree import EMPTY_TREE, ROOT, TokenTree
from orchestrator.request.merge import merge

# Called with the base length and a tree of outcomes and their continuations.
SendAhead = Callable[[int, TokenTree], None]

# Limits per drafter and round: trees, and nodes in total, assumed tokens included. The likeliest come first and are
# kept.
MOST_TREES = 64
MOST_NODES = 256
# Nodes of a round's trees of all drafters together; further ones are left out.
MOST_MERGED = 1024


@dataclass(frozen=True)
class ExpectedDraft:
    """Draft for an outcome that is not known yet: after the `assumed` tokens, of path log-probability `log_prob`.

    Raises:
        InvalidTreeError: `log_prob` is positive or not finite.
    """

    assumed: tuple[int, ...]
    log_prob: float
    tree: TokenTree

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens: the assumed ones, then the tree's."""
        return self.assumed + self.tree.token_ids

    def __post_init__(self) -> None:
        if not (self.log_prob <= 0 and math.isfinite(self.log_prob)):
            raise InvalidTreeError(f"an outcome has log-probability {self.log_prob}, not a finite number up to 0")


@dataclass
class AheadCounts:
    """Counts of rounds for which drafting ahead was requested (`expected`).

    `hits_by_rank[r]` are rounds whose outcome left the expected tree and was drafted for in time, by the rank of the
    outcome. `inside` are rounds that ended inside the expected tree, whose remainder is the next draft.
    """

    expected: int = 0
    hits_by_rank: list[int] = field(default_factory=list)
    inside: int = 0

    def count(self, rank: int | None) -> None:
        """Count a round by the rank of its outcome; None if that was not drafted for."""
        self.expected += 1
        if rank is not None:
            self.hits_by_rank.extend([0] * (rank + 1 - len(self.hits_by_rank)))
            self.hits_by_rank[rank] += 1

    def count_inside(self) -> None:
        """Count a round that ended inside the expected tree."""
        self.expected += 1
        self.inside += 1

    def add(self, other: AheadCounts) -> None:
        """Add the counts of another output."""
        self.expected += other.expected
        self.inside += other.inside
        self.hits_by_rank.extend([0] * (len(other.hits_by_rank) - len(self.hits_by_rank)))
        for rank, hits in enumerate(other.hits_by_rank):
            self.hits_by_rank[rank] += hits


class Expecting(Protocol):
    """A drafter, as drafting ahead sees it."""

    drafts_ahead: bool

    def expect(self, sequence_id: int, base_length: int, tree: TokenTree) -> None: ...


class AheadDrafting:
    """Drafting ahead for one request: expectations sent to drafters, and the trees they return.

    State of a round is dropped at its end, except the expected tree, which stays until the next one.
    """

    def __init__(self) -> None:
        self.counts = AheadCounts()
        self._send: SendAhead | None = None
        # State of the current round: drafters that were sent the expected tree, the tree sent to the verifier, and the
        # rank of each outcome in it.
        self._told: set[Expecting] = set()
        self._expected = EMPTY_TREE
        self._expected_length = 0
        self._tree = EMPTY_TREE
        self._ranks: dict[tuple[int, ...], int] = {}

    def opened(self, send: SendAhead | None, length: int) -> None:
        """Set the verifier's callback (None: no verifier); the round's tree is sent again."""
        self._send = send
        if send is not None and len(self._tree):
            send(length, self._tree)

    def expect(self, drafters: Iterable[tuple[Expecting, int]], length: int, tree: TokenTree) -> None:
        """Send the tree under verification to drafters (client, sequence id), once per round each."""
        for client, sequence_id in drafters:
            if client.drafts_ahead and client not in self._told:
                self._told.add(client)
                self._expected, self._expected_length = tree, length
                client.expect(sequence_id, length, tree)

    def add(self, length: int, drafts: Sequence[ExpectedDraft], source: str) -> bool:
        """Forward drafts made ahead of the round at `length`; False if none were requested."""
        if self._send is None or not self._told:
            return False
        for rank, draft in enumerate(drafts[:MOST_TREES]):
            if len(draft.tree):
                self._ranks[draft.assumed] = min(rank, self._ranks.get(draft.assumed, rank))
        merged = merge([self._tree, hung(drafts, source, self._expected)])
        if len(merged) <= MOST_MERGED:
            self._tree = merged
            self._send(length, self._tree)
        return True

    def late(self, length: int, drafts: Sequence[ExpectedDraft], source: str) -> TokenTree:
        """Drafts made ahead of an earlier round, as a tree for its length; empty if the round is unknown."""
        return hung(drafts, source, self._expected) if length == self._expected_length else EMPTY_TREE

    def following(self, token_ids: tuple[int, ...]) -> TokenTree:
        """Count the round's outcome; returns the drafts made ahead that follow it."""
        following = self._tree.descend(token_ids)
        if self._told:
            end = self._expected.find(token_ids)
            if end is not None and end in self._expected.parents:
                self.counts.count_inside()
            else:
                self.counts.count(self._rank(token_ids) if len(following) else None)
        return following

    def _rank(self, token_ids: tuple[int, ...]) -> int | None:
        """Best rank among the assumed outcomes that agree with the round's tokens; lengths may differ."""
        on_the_way = (rank for assumed, rank in self._ranks.items() if all(map(operator.eq, assumed, token_ids)))
        return min(on_the_way, default=None)

    def round_ended(self) -> None:
        """Forget the round."""
        if self._told:
            self._told.clear()
            self._ranks.clear()
            self._tree = EMPTY_TREE


def hung(drafts: Iterable[ExpectedDraft], source: str, expected: TokenTree = EMPTY_TREE) -> TokenTree:
    """One tree of all assumed tokens and the drafts after them, labelled with `source`.

    Assumed tokens in the expected tree keep its probabilities; others before the last assumed token count as certain.
    The last one brings the path's probability to that of the outcome. So pruning keeps the likeliest outcomes, and a
    round that ends inside the expected tree does not overrate its remainder.
    """
    token_ids: list[int] = []
    parents: list[int] = []
    log_probs: list[float] = []
    places: dict[tuple[int, int], int] = {}

    def place(parent: int, token: int, log_prob: float) -> int:
        node = places.get((parent, token))
        if node is None:
            node = places[parent, token] = len(token_ids)
            token_ids.append(token)
            parents.append(parent)
            log_probs.append(log_prob)
        else:
            log_probs[node] = max(log_probs[node], log_prob)
        return node

    for number, draft in enumerate(drafts):
        if number >= MOST_TREES or len(token_ids) + len(draft.assumed) + len(draft.tree) > MOST_NODES:
            break
        end, so_far = ROOT, 0.0
        known: int | None = ROOT
        for token in draft.assumed[:-1]:
            known = None if known is None else expected.children.get((known, token))
            log_prob = 0.0 if known is None else expected.log_probs[known]
            end = place(end, token, log_prob)
            so_far += log_prob
        if draft.assumed:
            end = place(end, draft.assumed[-1], min(0.0, draft.log_prob - so_far))
        nodes = [0] * len(draft.tree) + [end]
        for node, token in enumerate(draft.tree.token_ids):
            # The root's entry is last, at index -1.
            nodes[node] = place(nodes[draft.tree.parents[node]], token, draft.tree.log_probs[node])
    return TokenTree(tuple(token_ids), tuple(parents), tuple(log_probs), (source,) if token_ids else ())
