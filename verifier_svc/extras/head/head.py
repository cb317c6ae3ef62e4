"""Drafts of an EAGLE-3 head (2503.01840) in the verifier's own process, made as soon as a token is chosen.

A drafter elsewhere gets the target's states over the network and sends a tree back: four hops of a round. Here there
are none, and the states are at hand. In return the next pass waits for the drafts of all sequences: whether they pay is
estimated before each, and counted. Nothing of this decides on a token.
"""

from __future__ import annotations

import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from coppice.core.sampling import SamplingParams
from coppice.core.tree import EMPTY_TREE, TokenTree
from verifier_svc.engine.pass_cost import PassCost

# A draft has to promise so many times what it costs, and more for each further sequence of a pass: both are estimates,
# and messages with more in them take other services' time.
_MARGIN, _FURTHER_MARGIN = 1.1, 0.1
# Accepted nodes and nodes of a draft, until some were counted.
_FIRST_ACCEPTED, _FIRST_NODES = 1.0, 8.0
# Weight of a draft in the means of all sequences.
_COMMON_RATE = 1 / 64
# Drafts that the mean of all sequences counts for in a sequence's own, and weight of older drafts there.
_COMMON_WEIGHT, _FADE = 8.0, 1 - 1 / 32
# Accepted nodes that a sequence is first given on top of that mean: texts differ so much, and it has to find out.
_HOPE = 0.25
# More accepted nodes than that in a round are not to be hoped for.
_MOST_ACCEPTED = 4.0
# Rounds without a draft before one is tried: at first, and at most; of one sequence, and of all where none pays.
_OWN_PAUSES, _COMMON_PAUSES = (16, 256), (64, 4096)
# Less likely nodes are not worth their place in a pass at any price.
_LEAST_PROBABILITY = 0.02
# Rounds whose features are kept for a draft that may come.
_MOST_UNREAD = 64
# Rounds before a trial whose features are wanted: the head attends to the latest tokens most.
_ROUNDS_READ = 8
# Sequences that may have drafts: each has the states of its prompt, and more than a few do not draft at once.
_MOST_SEQUENCES = 16
# A draft may take so many usual ones, else something else delayed it.
_OUTLIER = 3.0


class HeadSequence(Protocol):
    """A head's state of one sequence, see `EagleSequence`."""

    def extend(self, token_ids: Sequence[int], features: bytes = b"") -> None:
        """Add committed tokens with their features."""

    def see_prompt(self, first_token: int, features: bytes) -> None:
        """Add rows of the prompt."""

    def read(self, max_pieces: int) -> int:
        """Read at most so many pieces of rows; returns those that are left."""
        ...

    def draft(self, max_nodes: int, row_multiple: int = 1, least_probability: float = 0.0) -> TokenTree:
        """Best tree of at most so many nodes, whose paths are at least so likely."""
        ...


class Head(Protocol):
    """A loaded head, see `LoadedHead`."""

    def open(self, prompt: Sequence[int], sampling: SamplingParams) -> HeadSequence:
        """Open a sequence."""
        ...


class _DraftTime:
    """Mean seconds of a draft; 0 before the first."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._count = 0

    def add(self, seconds: float) -> None:
        self._count += 1
        if self._count > 1:
            seconds = min(seconds, _OUTLIER * self.seconds)
        self.seconds += max(_COMMON_RATE, 1 / self._count) * (seconds - self.seconds)


class _Pauses:
    """Rounds without drafts, twice as many each time, from a first number to a last one."""

    def __init__(self, first: int, last: int) -> None:
        self._first, self._last = first, last
        self.end()

    def end(self) -> None:
        """Drafts pay again."""
        self.rounds_left = self._next = self._first

    def is_over(self) -> bool:
        """Count a round; whether a draft is tried in it."""
        self.rounds_left -= 1
        if self.rounds_left > 0:
            return False
        self._next = min(2 * self._next, self._last)
        self.rounds_left = self._next
        return True


class _Counted:
    """Means of drafts of requests of one kind: accepted nodes, and nodes; and their trials where none pays."""

    def __init__(self) -> None:
        self.accepted, self.nodes = _FIRST_ACCEPTED, _FIRST_NODES
        self.pauses = _Pauses(*_COMMON_PAUSES)
        # As the last of all sequences' rounds has left it.
        self.wants_features = True

    def add(self, accepted: int, nodes: int) -> None:
        self.accepted += _COMMON_RATE * (accepted - self.accepted)
        self.nodes += _COMMON_RATE * (nodes - self.nodes)


@dataclass(frozen=True, slots=True)
class HeadSettings:
    """A head, most nodes of its trees, and what passes and drafts cost and bring, which is learned.

    `max_prompt_features` are the tokens of a prompt whose states it reads. So many threads draft at once.
    """

    head: Head
    max_nodes: int
    max_prompt_features: int = 0
    num_threads: int = 1
    cost: PassCost = field(default_factory=PassCost)
    clock: Callable[[], float] = time.perf_counter
    # Of greedy requests, and of sampled ones.
    counted: tuple[_Counted, _Counted] = field(default_factory=lambda: (_Counted(), _Counted()))
    time: _DraftTime = field(default_factory=_DraftTime)
    # Those that draft.
    open: weakref.WeakSet[HeadDrafts] = field(default_factory=weakref.WeakSet)

    @property
    def has_room(self) -> bool:
        """Whether a further sequence may have drafts."""
        return len(self.open) < _MOST_SEQUENCES


class HeadDrafts:
    """Drafts of one sequence, at most `max_nodes` nodes each. Used on the engine's thread, but for `draft`."""

    def __init__(self, settings: HeadSettings, prompt: Sequence[int], sampling: SamplingParams, max_nodes: int) -> None:
        self._settings = settings
        self._max_nodes = min(max_nodes, settings.max_nodes)
        self._counted = settings.counted[sampling.temperature > 0]
        # The features of the next round's tokens, and of the prompt's, are wanted where a draft may pay.
        self.wants_features = self._counted.wants_features
        self.max_prompt_features = settings.max_prompt_features if self.wants_features else 0
        # Opened by the first draft: where none pays, a head costs nothing.
        self._open = partial(settings.head.open, prompt, sampling)
        self._sequence: HeadSequence | None = None
        # Accepted nodes and number of its own drafts, older ones less.
        self._own, self._num_own = 0.0, 0.0
        self._pauses = _Pauses(*_OWN_PAUSES)
        # What the head is told before its next draft: features of the prompt, tokens of rounds that are long ago, and
        # later rounds.
        self._unread_prompt: list[tuple[int, bytes]] = []
        self._unread_tokens: list[int] = []
        self._unread: deque[tuple[Sequence[int], bytes]] = deque()
        # Nodes of the last draft, if its round is not over.
        self._drafted = 0
        settings.open.add(self)

    def see_prompt(self, first_token: int, features: bytes) -> None:
        """Add features of the prompt's tokens from number `first_token` on."""
        self._unread_prompt.append((first_token, features))

    def committed(self, token_ids: Sequence[int], features: bytes, num_accepted: int | None) -> None:
        """Add a round's tokens; `num_accepted` nodes of the last draft were right, None if it was not verified."""
        self._unread.append((token_ids, features))
        if len(self._unread) > _MOST_UNREAD:
            # The features of what is long ago are given up, not the tokens.
            self._unread_tokens += self._unread.popleft()[0]
        if self._drafted and num_accepted is not None:
            self._counted.add(num_accepted, self._drafted)
            self._own = _FADE * self._own + num_accepted
            self._num_own = _FADE * self._num_own + 1
        self._drafted = 0

    def draft(self, num_sequences: int) -> TokenTree:
        """A tree after all committed tokens, for a pass that so many sequences share; for any one thread."""
        settings = self._settings
        begun_s = settings.clock()
        if self._sequence is None:
            self._sequence = self._open()
        self._tell(self._sequence)
        if self._sequence.read(max_pieces=1):
            # Of a long prompt; the other pieces are read in the next rounds.
            return EMPTY_TREE
        tree = self._sequence.draft(self._max_nodes, least_probability=self._least(num_sequences))
        settings.time.add(settings.clock() - begun_s)
        self._drafted = len(tree)
        return tree

    def _tell(self, sequence: HeadSequence) -> None:
        for first_token, features in self._unread_prompt:
            sequence.see_prompt(first_token, features)
        if self._unread_tokens:
            sequence.extend(self._unread_tokens)
        for token_ids, features in self._unread:
            sequence.extend(token_ids, features)
        self._unread_prompt, self._unread_tokens = [], []
        self._unread.clear()

    @property
    def expected(self) -> float:
        """Accepted nodes to expect of a draft."""
        return (_COMMON_WEIGHT * (self._counted.accepted + _HOPE) + self._own) / (_COMMON_WEIGHT + self._num_own)

    def pays(self, num_sequences: int) -> bool:
        """Whether drafts of all sequences make a round's tokens grow by more than its time; if not, now and then."""
        plain_s, row_s = self._settings.cost.seconds(num_sequences)
        if plain_s <= 0:
            return True
        draft_s = self._draft_s(num_sequences) + self._counted.nodes * row_s
        needed = (_MARGIN + _FURTHER_MARGIN * (num_sequences - 1)) * num_sequences * draft_s / plain_s
        if needed > _MOST_ACCEPTED:
            self.wants_features = self._counted.wants_features = False
            return False
        if self._counted.accepted + _HOPE < needed:
            return self._is_trial(self._counted.pauses)
        self._counted.pauses.end()
        if self.expected < needed:
            return self._is_trial(self._pauses)
        self._pauses.end()
        self.wants_features = self._counted.wants_features = True
        return True

    def _draft_s(self, num_sequences: int) -> float:
        """Seconds of each of so many drafts, which threads make side by side."""
        turns = -(-num_sequences // self._settings.num_threads)
        return self._settings.time.seconds * turns / num_sequences

    def _is_trial(self, pauses: _Pauses) -> bool:
        is_trial = pauses.is_over()
        self.wants_features = is_trial or pauses.rounds_left <= _ROUNDS_READ
        self._counted.wants_features = self.wants_features or pauses is self._pauses
        return is_trial

    def _least(self, num_sequences: int) -> float:
        """Probability of a node that brings what its row costs all sequences of the pass."""
        plain_s, row_s = self._settings.cost.seconds(num_sequences)
        if plain_s <= 0 or not math.isfinite(row_s):
            return _LEAST_PROBABILITY
        drafts_s = num_sequences * (self._counted.nodes * row_s + self._draft_s(num_sequences))
        price = row_s * num_sequences * (1 + self.expected) / (plain_s + drafts_s)
        return max(_LEAST_PROBABILITY, _MARGIN * price)
