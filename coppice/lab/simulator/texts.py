"""Texts of the target, with a drafter's tree after each position."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from dataclasses import dataclass
from typing import Protocol

from coppice.core.tree import EMPTY_TREE, ROOT, TokenTree

# The drafter's own limits: a path less likely than this is not worth a row, nor even one that costs nothing.
LEAST_PROBABILITY = 0.12
LEAST_FILL = 0.03


class Text(Protocol):
    """One output. Positions count its tokens from 0. `prompt`: the tokens before it, empty where they are not known."""

    @property
    def prompt(self) -> tuple[int, ...]: ...

    def said(self, first: int, last: int) -> list[int]:
        """Tokens from one position to before another."""
        ...

    def draft(self, position: int, max_nodes: int, row_multiple: int) -> TokenTree:
        """A drafter's tree behind the tokens before a position."""
        ...


@dataclass(frozen=True)
class Trace:
    """A greedy output that was recorded: its tokens, and behind the first n of them the drafter's tree, for each n.

    `prompt`: the tokens before it, or none where they were not recorded.

    Raises:
        ValueError: there is no token, or not one tree for each, or the prompt has another length.
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
        """The tokens before the output, where they were recorded."""
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


@dataclass(frozen=True)
class Predictability:
    """The drafter's chance to be right with its first child, and with its second.

    `confidence` is what the drafter makes of it, as a power of the truth: below 1 it promises too much.
    """

    first: float = 0.88
    second: float = 0.06
    spread: float = 0.1
    confidence: float = 1.0


class DrawnText:
    """An output of random predictability, without end."""

    prompt: tuple[int, ...] = ()

    def __init__(self, predictability: Predictability, seed: int) -> None:
        self._predictability = predictability
        self._random = random.Random(seed)
        # By position: the chance of the likeliest token, 1, and the token that the target says.
        self._chances: list[float] = []
        self._said: list[int] = []

    def said(self, first: int, last: int) -> list[int]:
        """Tokens from one position to before another."""
        self._say(last)
        return self._said[first:last]

    def draft(self, position: int, max_nodes: int, row_multiple: int) -> TokenTree:
        """The best tree by the drafter's own belief, and filled up to the multiple of rows."""
        if max_nodes < 1:
            return EMPTY_TREE
        tokens: list[int] = []
        parents: list[int] = []
        logs: list[float] = []
        numbers = itertools.count()
        found: list[tuple[float, int, float, int, int, int]] = []

        def add(parent: int, cost: float, depth: int) -> None:
            for token, chance in enumerate(self._children(position + depth), start=1):
                log = self._predictability.confidence * math.log(chance)
                heapq.heappush(found, (cost - log, next(numbers), log, parent, token, depth + 1))

        add(ROOT, 0.0, 0)
        while found and len(tokens) < max_nodes:
            cost, _, log, parent, token, depth = heapq.heappop(found)
            fills = (1 + len(tokens)) % row_multiple != 0
            if math.exp(-cost) < (LEAST_FILL if fills else LEAST_PROBABILITY):
                break
            add(len(tokens), cost, depth)
            tokens.append(token)
            parents.append(parent)
            logs.append(log)
        return TokenTree(tuple(tokens), tuple(parents), tuple(logs), ("drawn",))

    def _children(self, position: int) -> tuple[float, float]:
        self._say(position)
        return self._chances[position], min(self._predictability.second, 1 - self._chances[position])

    def _say(self, position: int) -> None:
        text = self._predictability
        while len(self._said) <= position:
            first = min(0.99, max(0.02, text.first + self._random.uniform(-text.spread, text.spread)))
            draw = self._random.random()
            self._chances.append(first)
            self._said.append(1 if draw < first else 2 if draw < first + text.second else 0)
