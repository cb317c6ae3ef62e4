"""Drafts that the verifier makes by itself as soon as a token is chosen: looked up, or of a head.

A looked-up draft costs next to nothing, so that it is always tried first; the head is asked where the text has not been
there before. Nothing of this decides on a token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from coppice.core.sampling import SamplingParams
from coppice.core.tree import EMPTY_TREE, TokenTree
from verifier_svc.extras.head.head import HeadDrafts, HeadSettings
from verifier_svc.extras.lookup.lookup import LookupSettings, PromptLookup


class OwnDrafts:
    """Drafts of one sequence. Used on the engine's thread."""

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
        self._lookup = self._head = None
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

    def draft(self, tokens: Sequence[int], num_sequences: int) -> TokenTree:
        """A tree after all committed `tokens`, for a pass that so many sequences share; empty where none pays."""
        found = EMPTY_TREE if self._lookup is None else self._lookup.draft(tokens, num_sequences)
        if self._head is None or sum(map(math.exp, found.path_log_probs)) >= self._head.expected:
            return found
        drafted = self._head.draft(num_sequences)
        return drafted if len(drafted) else found
