"""What drafters send is checked here before any of it is used."""

from __future__ import annotations

from collections.abc import Sequence

from coppice.core.errors import InvalidTreeError
from coppice.core.tree import TokenTree
from orchestrator.request.ahead import ExpectedDraft


def check_draft(tree: TokenTree, vocab_size: int, *, is_sampled: bool) -> None:
    """Raise InvalidTreeError: a token is not in the vocabulary, or the tree had to be sampled and is not."""
    named = [tree.token_ids]
    if is_sampled:
        if len(tree) and not tree.distributions:
            raise InvalidTreeError("traversal verification needs the distributions that the tree was drawn from")
        named += [distribution.token_ids for distribution in tree.distributions if distribution is not None]
    _check_tokens(named, vocab_size)


def check_ahead(drafts: Sequence[ExpectedDraft], vocab_size: int) -> None:
    """Raise InvalidTreeError: a token is not in the vocabulary."""
    _check_tokens([draft.token_ids for draft in drafts], vocab_size)


def _check_tokens(named: Sequence[Sequence[int]], vocab_size: int) -> None:
    if any(max(token_ids, default=0) >= vocab_size for token_ids in named):
        raise InvalidTreeError(f"a token id is outside the vocabulary of {vocab_size}")
