"""Texts of the target, with a drafter's tree after each position."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from coppice.core.tree import TokenTree

# The drafter's own limit: a path less likely than this is not worth a row.
LEAST_PROBABILITY = 0.12


class Text(Protocol):
    """One output. Positions count its tokens from 0. `prompt`: the tokens before it, empty where they are not known."""

    @property
    def prompt(self) -> tuple[int, ...]: ...

    def said(self, first: int, last: int) -> list[int]:
        """Tokens from one position to before another."""
        ...

    def draft(self, position: int, max_nodes: int, row_multiple: int) -> TokenTree:
        """A drafter's tree after the tokens before a position."""
        ...


@dataclass(frozen=True)
class Trace:
    """A greedy output that was recorded: its tokens, and after the first n of them the drafter's tree, for each n.

    `prompt`: the tokens before it, or none where they were not recorded. Raises ValueError if there is no token, or not
    one tree for each, or the prompt has another length.
    """

    num_prompt: int
    token_ids: tuple[int, ...]
    trees: tuple[TokenTree, ...]
    prompt: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.token_ids or len(self.token_ids) != len(self.trees):
            raise ValueError("a trace needs one tree for each of its tokens, and one token at least")
        if self.num_prompt < 1:
            raise ValueError("a trace needs a prompt")
        if self.prompt and len(self.prompt) != self.num_prompt:
            raise ValueError(f"a prompt of {len(self.prompt)} tokens is said to have {self.num_prompt}")


class TracedText:
    """A recorded output; one that is longer than the record begins it again."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    @property
    def prompt(self) -> tuple[int, ...]:
        return self._trace.prompt

    def said(self, first: int, last: int) -> list[int]:
        """Tokens from one position to before another."""
        tokens = self._trace.token_ids
        return [tokens[position % len(tokens)] for position in range(first, last)]

    def draft(self, position: int, max_nodes: int, row_multiple: int) -> TokenTree:
        """The recorded tree, cut as a drafter with a lower budget cuts its own.

        Nodes that only fill up rows were recorded, too; they are left out where there is nothing to fill.
        """
        trees = self._trace.trees
        tree = trees[position % len(trees)]
        least = math.log(LEAST_PROBABILITY) - 1e-6
        num_worth = min(max_nodes, sum(value >= least for value in tree.path_log_probs))
        rows = -(-(1 + num_worth) // row_multiple) * row_multiple
        return tree.prune(min(rows - 1, max_nodes))
