"""Drafts made ahead of one round: trees after its likely outcomes, as one tree for the verifier.

The verifier gets them at once, under the length that the round starts from, and keeps them with the round's own
draft. When the outcome is known, what follows it is there, without a message. Kept here and sent on with the
outcome, they would come two messages later.
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

# Base length, and outcomes of the round there with what may follow them.
SendAhead = Callable[[int, TokenTree], None]

# Of one drafter and round: most trees, and most nodes in all, those of the assumed tokens included. What is more is
# left out; the likeliest come first.
MOST_TREES = 64
MOST_NODES = 256


@dataclass(frozen=True)
class ExpectedDraft:
    """A tree after an outcome that is not known yet: `assumed` tokens, of which `log_prob` says how likely they are.

    Raises:
        InvalidTreeError: that is no log-probability.
    """

    assumed: tuple[int, ...]
    log_prob: float
    tree: TokenTree

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens that it names."""
        return self.assumed + self.tree.token_ids

    def __post_init__(self) -> None:
        if not (self.log_prob <= 0 and math.isfinite(self.log_prob)):
            raise InvalidTreeError(f"an outcome has log-probability {self.log_prob}, not a finite number up to 0")


@dataclass
class AheadCounts:
    """Rounds whose tree a drafter was told to expect, and those with a draft after their outcome before it was known.

    Of outcomes that left the expected tree, those drafted for, by their rank from 0. Rounds that verified another tree
    may end `inside` the expected one: where it goes on, it is the draft that was there.
    """

    expected: int = 0
    hits_by_rank: list[int] = field(default_factory=list)
    inside: int = 0

    def count(self, rank: int | None) -> None:
        """A round is over; None where its outcome was not drafted for."""
        self.expected += 1
        if rank is not None:
            self.hits_by_rank.extend([0] * (rank + 1 - len(self.hits_by_rank)))
            self.hits_by_rank[rank] += 1

    def count_inside(self) -> None:
        """A round is over that ended inside the expected tree, where it goes on."""
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
    """A drafter, as far as it is told what to expect."""

    drafts_ahead: bool

    def expect(self, sequence_id: int, base_length: int, tree: TokenTree) -> None: ...


class AheadDrafting:
    """One request's drafting ahead: what its drafters are told to expect, and what they make of it.

    Of a round, nothing is kept once it is over but what was expected, until something else is.
    """

    def __init__(self) -> None:
        self.counts = AheadCounts()
        self._send: SendAhead | None = None
        # Of the current round: who was told what to expect; what the verifier was sent, and each outcome's rank.
        self._told: set[Expecting] = set()
        self._expected = EMPTY_TREE
        self._expected_length = 0
        self._tree = EMPTY_TREE
        self._ranks: dict[tuple[int, ...], int] = {}

    def opened(self, send: SendAhead | None, length: int) -> None:
        """A verifier has the sequence at this length, and only that, or none has it; what is there is sent again."""
        self._send = send
        if send is not None and len(self._tree):
            send(length, self._tree)

    def expect(self, drafters: Iterable[tuple[Expecting, int]], length: int, tree: TokenTree) -> None:
        """Tell drafters, by their ids of the sequence, what is being verified: each once a round."""
        for client, sequence_id in drafters:
            if client.drafts_ahead and client not in self._told:
                self._told.add(client)
                self._expected, self._expected_length = tree, length
                client.expect(sequence_id, length, tree)

    def add(self, length: int, drafts: Sequence[ExpectedDraft], source: str) -> bool:
        """Send on what a drafter drafted ahead of the round that starts at `length`; False where nobody asked."""
        if self._send is None or not self._told:
            return False
        for rank, draft in enumerate(drafts[:MOST_TREES]):
            if len(draft.tree):
                self._ranks[draft.assumed] = min(rank, self._ranks.get(draft.assumed, rank))
        self._tree = merge([self._tree, hung(drafts, source, self._expected)])
        self._send(length, self._tree)
        return True

    def late(self, length: int, drafts: Sequence[ExpectedDraft], source: str) -> TokenTree:
        """What was drafted ahead of an earlier round, as a draft for its length; empty where nobody knows of what."""
        return hung(drafts, source, self._expected) if length == self._expected_length else EMPTY_TREE

    def following(self, token_ids: tuple[int, ...]) -> TokenTree:
        """The round had this outcome, which is counted; returns what was drafted ahead after it."""
        following = self._tree.descend(token_ids)
        if self._told:
            end = self._expected.find(token_ids)
            if end is not None and end in self._expected.parents:
                self.counts.count_inside()
            else:
                self.counts.count(self._rank(token_ids) if len(following) else None)
        return following

    def _rank(self, token_ids: tuple[int, ...]) -> int | None:
        """The best rank of what was assumed on the way that was taken; a round may end before or after it."""
        on_the_way = (rank for assumed, rank in self._ranks.items() if all(map(operator.eq, assumed, token_ids)))
        return min(on_the_way, default=None)

    def round_ended(self) -> None:
        """Forget the round."""
        if self._told:
            self._told.clear()
            self._ranks.clear()
            self._tree = EMPTY_TREE


def hung(drafts: Iterable[ExpectedDraft], source: str, expected: TokenTree = EMPTY_TREE) -> TokenTree:
    """One tree of the trees' assumed tokens and what is after them; nodes count as proposed by `source`.

    Tokens of the expected tree are as likely as it says, others before an outcome's last token count as certain; that
    one makes its path as likely as the outcome. So whoever cuts the tree leaves the likeliest of it, and a round that
    ends inside the expected tree finds nothing there that promises more than it is worth.
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
            # The root's own place comes last, where its index of -1 finds it.
            nodes[node] = place(nodes[draft.tree.parents[node]], token, draft.tree.log_probs[node])
    return TokenTree(tuple(token_ids), tuple(parents), tuple(log_probs), (source,) if token_ids else ())
