"""Outputs that are drawn, without end: for tests of the planner under a steady load."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from dataclasses import dataclass

from coppice.core.tree import EMPTY_TREE, ROOT, TokenTree
from coppice.lab.simulator.profile import LEAST_PROBABILITY

# A path less likely than this is not worth a row even where that costs nothing.
LEAST_FILL = 0.03


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
    """An output of random predictability, without end, whose rest may become more predictable, or less."""

    prompt: tuple[int, ...] = ()

    def __init__(self, predictability: Predictability, seed: int) -> None:
        self._predictability = predictability
        self._random = random.Random(seed)
        # By position: the chance of the likeliest token, 1, and the token that the target says.
        self._chances: list[float] = []
        self._said: list[int] = []

    def change(self, predictability: Predictability) -> None:
        """What nobody has asked for yet is drawn from this."""
        self._predictability = predictability

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
