"""Sampler: one token for each row of a pass, all rows at once.

The token after a node is a function of the node's row, its own history, which is the path to it, and the seed and
position. A pass can therefore draw all tokens before any is committed, and acceptance is a walk over integers. On the
CPU a node's row is left out unless its parent's draw leads to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from coppice.core.sampling import SamplingParams
from coppice.core.tree import ROOT, TokenTree
from verifier_svc.kernels.cpu.shared_work import SharedThreads, new_counters
from verifier_svc.kernels.cpu.token_draws import NOT_REACHED, UNDECIDED, draw_rows, edit, is_edited

Logits: TypeAlias = npt.NDArray[np.float32]
Mask: TypeAlias = npt.NDArray[np.bool_]
IntArray: TypeAlias = npt.NDArray[np.int64]
# [R, 2]: token, and whether it was a near-tie.
Draws: TypeAlias = IntArray
NO_MASK: Mask = np.empty(0, np.bool_)
# Scores that one thread processes in the time that another needs to start.
_WORTH_THREADS = 1 << 18
_THREADS = SharedThreads()


class Chooser(Protocol):
    """A sequence as the sampler sees it: parameters, columns of `token_draws`, and the history of penalties.

    `lists` are bias, allowed, bad and end tokens, each with values.
    """

    params: SamplingParams
    min_tokens: int
    num_output: int
    history: IntArray
    counts: npt.NDArray[np.float64]
    lists: tuple[tuple[IntArray, npt.NDArray[np.float64]], ...]
    whole: tuple[int, int]
    real: tuple[float, ...]

    def count(self, token: int) -> float | None:
        """Count of a token in the output, None for one that never came."""

    def choose_exactly(self, scores: Logits, position: int) -> int:
        """Token from a row of scores [vocab], where rounding decides which ones `top_p` keeps."""


class RowTable:
    """Rows to draw from, with their sequences' parameters and their own histories.

    Rows are added in the order of the logits, parents before children.
    """

    def __init__(self) -> None:
        self._choosers: list[Chooser] = []
        self._starts: list[int] = []
        self._rows: list[tuple[int, ...]] = []
        self._whole: list[tuple[int, ...]] = []
        self._real: list[tuple[float, ...]] = []
        self._tokens: list[IntArray] = []
        self._values: list[npt.NDArray[np.float64]] = []
        self._size = 0
        self._arrays: tuple[Any, ...] = ()
        self._draws: Draws = np.empty((0, 2), np.int64)

    def add(self, chooser: Chooser, tree: TokenTree, first: int, position: int) -> None:
        """Add rows from `first` on: a root's and its tree's; the root's token is for `position`."""
        self._add_sequence(chooser)
        root = len(self._rows)
        self._add_row(chooser, first, position, ())
        index, size, free = len(self._whole) - 1, self._size, chooser.min_tokens - chooser.num_output
        nodes = zip(tree.depths, tree.parents, tree.token_ids, strict=True)
        if not chooser.params.has_penalties:
            self._rows += [
                (row, index, position + depth, size, size, depth < free, root + parent - ROOT, token)
                for row, (depth, parent, token) in enumerate(nodes, start=first + 1)
            ]
            return
        paths: list[tuple[int, ...]] = []
        for row, (_, parent, token) in enumerate(nodes, start=first + 1):
            paths.append((*(() if parent == ROOT else paths[parent]), token))
            self._add_row(chooser, row, position, paths[-1], root + parent - ROOT, token)

    def add_after(self, chooser: Chooser, path: Sequence[int]) -> None:
        """Add the first row of the logits, which follows `path` after the output."""
        self._add_sequence(chooser)
        self._add_row(chooser, 0, 0, path)

    def draw(self, logits: Logits, num_threads: int = 1, first: int = 0, mask: Mask = NO_MASK) -> None:
        """Draw from the rows in `logits` [K, vocab], the first of which is row `first` of the pass.

        Args:
            logits: raw.
            num_threads: upper bound of threads, for large work only.
            first: see there.
            mask: tokens allowed by the grammar, for all rows [vocab].
        """
        if not self._rows:
            return
        if not self._arrays:
            self._arrays = self._as_arrays()
            self._draws = np.full((len(self._rows), 2), NOT_REACHED)
        rows, draws, logits = self._arrays[0], self._draws, np.ascontiguousarray(logits)
        starts = np.array([*self._starts, len(rows)])
        is_much = len(self._starts) * logits.shape[1] >= _WORTH_THREADS
        threads = min(num_threads, len(self._starts)) if is_much else 1
        _THREADS.call(draw_rows, threads, logits, *self._arrays, mask, draws, starts, first, new_counters(1))
        for index in (draws[:, 0] == UNDECIDED).nonzero()[0].tolist():
            row, sequence, position = rows[index, :3].tolist()
            scores = self._edited(logits[row - first], rows[index], mask)
            draws[index, 0] = self._choosers[sequence].choose_exactly(scores, position)

    def drawn(self) -> Iterator[Draws]:
        """Draws of each sequence's rows; token 0 in rows left out, and if the parameters forbid every token."""
        np.maximum(self._draws, 0, out=self._draws)
        for start, stop in zip(self._starts, [*self._starts[1:], len(self._rows)], strict=True):
            yield self._draws[start:stop]

    def draw_one(self, logits: Logits, mask: Mask) -> tuple[int, int]:
        """Draw from a single row [vocab]; NOTHING_ALLOWED if no token is allowed."""
        self.draw(logits[None], mask=mask)
        token, is_near_tie = self._draws[0].tolist()
        return token, is_near_tie

    def edited(self, logits: Logits, mask: Mask) -> Logits:
        """Scores [vocab] of a single row, from its logits [vocab]."""
        self._arrays = self._as_arrays()
        return self._edited(np.ascontiguousarray(logits), self._arrays[0][0], mask)

    def _edited(self, logits: Logits, row: IntArray, mask: Mask) -> Logits:
        _, whole, real, tokens, values = self._arrays
        lists = whole[row[1]]
        if not is_edited(row, lists, mask):
            return logits
        scores = np.empty_like(logits)
        edit(logits, row, lists, real[row[1]], tokens, values, mask, scores)
        return scores

    def _as_arrays(self) -> tuple[Any, ...]:
        return (
            np.array(self._rows, np.int64),
            np.array(self._whole, np.int64),
            np.array(self._real, np.float64),
            np.concatenate(self._tokens) if self._tokens else np.empty(0, np.int64),
            np.concatenate(self._values) if self._values else np.empty(0, np.float64),
        )

    def _add_sequence(self, chooser: Chooser) -> None:
        self._choosers.append(chooser)
        self._starts.append(len(self._rows))
        bounds = [self._size]
        if len(chooser.history):
            self._append(chooser.history, chooser.counts)
        bounds.append(self._size)
        for tokens, values in chooser.lists:
            if len(tokens):
                self._append(tokens, values)
            bounds.append(self._size)
        self._whole.append((*chooser.whole, *bounds))
        self._real.append(chooser.real)

    def _add_row(
        self, chooser: Chooser, row: int, position: int, path: Sequence[int], parent: int = -1, token: int = 0
    ) -> None:
        start, depth = self._size, len(path)
        if path and chooser.params.has_penalties:
            self._append(np.array(path, np.int64), np.array([chooser.count(token) or 0.0 for token in path]))
        forbids_end = chooser.num_output + depth < chooser.min_tokens
        index = len(self._whole) - 1
        self._rows.append((row, index, position + depth, start, self._size, forbids_end, parent, token))

    def _append(self, tokens: IntArray, values: npt.NDArray[np.float64]) -> None:
        self._tokens.append(tokens)
        self._values.append(values)
        self._size += len(tokens)
