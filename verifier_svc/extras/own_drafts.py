"""Drafts that the verifier makes by itself as soon as a token is chosen: looked up, or of a head.

A looked-up draft costs next to nothing, so that it is always tried first; the head is asked where the text has not been
there before. Nothing of this decides on a token.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from coppice.core.sampling import SamplingParams
from coppice.core.tree import EMPTY_TREE, TokenTree
from verifier_svc.extras.head.head import HeadDrafts, HeadSettings
from verifier_svc.extras.lookup.lookup import LookupSettings, PromptLookup

logger = logging.getLogger(__name__)


class OwnDrafts:
    """Drafts of one sequence. Used on the engine's thread, but for `ask_head`."""

    def __init__(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        lookup: LookupSettings | None,
        max_lookup_nodes: int,
        head: HeadSettings | None,
        max_head_nodes: int,
    ) -> None:
        """With at most so many nodes each; 0 or None: none."""
        self._lookup: PromptLookup | None = None
        self._head: HeadDrafts | None = None
        self._tree = EMPTY_TREE
        if lookup is not None and max_lookup_nodes:
            self._lookup = PromptLookup(lookup, max_lookup_nodes, sampling.temperature > 0)
        if head is not None and max_head_nodes and head.has_room:
            self._head = HeadDrafts(head, prompt, sampling, max_head_nodes)

    @property
    def max_prompt_features(self) -> int:
        """Tokens of the prompt, the last ones, whose features are wanted."""
        return 0 if self._head is None else self._head.max_prompt_features

    @property
    def wants_features(self) -> bool:
        """Whether features of the tokens of the coming round are wanted."""
        return self._head is not None and self._head.wants_features

    def see_prompt(self, first_token: int, features: bytes) -> None:
        """Add features of the prompt's tokens from number `first_token` on."""
        if self._head is not None:
            self._head.see_prompt(first_token, features)

    def committed(self, token_ids: Sequence[int], features: bytes, num_accepted: int | None) -> None:
        """Add a round's tokens; `num_accepted` nodes of the last draft were right, None if it was not verified."""
        if self._lookup is not None:
            self._lookup.committed(token_ids)
        if self._head is not None:
            self._head.committed(token_ids, features, num_accepted)

    def begin(self, tokens: Sequence[int], num_sequences: int) -> bool:
        """Look for a tree after all committed `tokens`; returns whether `ask_head` may find a better one.

        For a pass that so many sequences share. An error ends this sequence's drafts, not the sequence.
        """
        try:
            if self._lookup is not None:
                self._tree = self._lookup.draft(tokens, num_sequences)
            found = sum(map(math.exp, self._tree.path_log_probs))
            return self._head is not None and found < self._head.expected and self._head.pays(num_sequences)
        except Exception:  # a bug of ours costs speed alone
            logger.exception("a sequence's own drafts failed")
            self._lookup = self._head = None
            return False

    def ask_head(self, num_sequences: int) -> None:
        """Have the head draft, on any thread. An error ends its drafts for this sequence."""
        assert self._head is not None
        try:
            drafted = self._head.draft(num_sequences)
        except Exception:  # a bug of ours costs speed alone
            logger.exception("the head failed to draft")
            self._head = None
            return
        if len(drafted):
            self._tree = drafted

    def take(self) -> TokenTree:
        """The tree that was found; empty where none pays. Once."""
        tree, self._tree = self._tree, EMPTY_TREE
        return tree


class HeadThreads:
    """Drafts of heads for several sequences at once, on this thread and others."""

    def __init__(self, num_threads: int) -> None:
        self._num_helpers = num_threads - 1
        self._helpers = ThreadPoolExecutor(max(1, self._num_helpers), "drafts")

    def ask(self, drafts: Sequence[OwnDrafts], num_sequences: int) -> None:
        """Call `ask_head` of each, for a pass that so many sequences share."""
        waiting = deque(drafts)

        def work() -> None:
            while True:
                try:
                    own = waiting.popleft()
                except IndexError:
                    return
                own.ask_head(num_sequences)

        others = [self._helpers.submit(work) for _ in range(min(self._num_helpers, len(drafts) - 1))]
        work()
        for other in others:
            if not other.cancel():
                other.result()
