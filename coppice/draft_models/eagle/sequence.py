"""Trees of an EAGLE-3 layer (2503.01840) on the target's hidden states, coupled to the request's noise.

Row i has committed token i + 1 and the target's states of the row before it; its output is the distribution of token
i + 2. Rows of the prompt, as far as their states come, are only attended to. Drafted tokens' rows have the drafter's
own states, and are not kept: accepted ones are read again with the target's.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from coppice.core.feature_layers import MOST_PROMPT_FEATURES
from coppice.core.sampling import SamplingParams
from coppice.core.tree import EMPTY_TREE, ROOT, TokenTree
from coppice.draft_models.coupling import ChildChoice, Coupling, NoiseRows
from coppice.draft_models.eagle.checkpoint import KIND, EagleCalibration
from coppice.draft_models.eagle.forward import (
    MOST_UNREAD,
    WINDOW,
    CommittedRows,
    EagleForward,
    EagleRows,
    EagleSearch,
)
from coppice.kernels.cpu.half_tables import floats
from coppice.kernels.cpu.picked_noise import fill_picked_noise
from coppice.search.error_scales import error_scales_at
from coppice.search.likeliest_tokens import top_children
from coppice.search.tree_builder import Frontier, build_tree
from coppice.search.tree_limits import Children, TreeLimits

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]

BYTES_PER_NUMBER = 2
# Larger states are damaged: their squares are finite, and no model has such.
_LARGEST_STATE = 1e6
# Tokens of a prompt beyond the draft vocabulary, the latest: each costs an output row.
MOST_PROMPT_IDS = 2048
_ONE = np.float32(1)
# Rounds of the warm-up, enough to reach every code path.
_WARM_UP_ROUNDS = 3
COUPLED = ChildChoice()


class HeadSizes(NamedTuple):
    """Tokens of the target's vocabulary, and numbers of a token's features."""

    vocab_size: int
    feature_size: int


class LoadedHead:
    """A loaded head. `limits` bounds every search; a request's budget lowers `max_nodes`.

    Several threads may use its sequences at once, each by one of them.
    """

    def __init__(
        self,
        forward: EagleForward,
        sizes: HeadSizes,
        calibration: EagleCalibration,
        limits: TreeLimits,
        choice: ChildChoice = COUPLED,
    ) -> None:
        self._forward = forward
        self._sizes = sizes
        self._calibration = calibration
        self._limits = limits
        self._choice = choice

    def open(self, prompt: Sequence[int], sampling: SamplingParams) -> EagleSequence:
        """Open a sequence; the first draft needs the first token's features."""
        choice, temperature = self._choice, sampling.temperature
        calibrated = error_scales_at(self._calibration.sigmas, temperature, self._limits.max_steps + 1)
        sigmas = np.asarray([choice.sigma(temperature, sigma) for sigma in calibrated], np.float32)
        return EagleSequence(self._forward, self._sizes, prompt, sampling, sigmas, self._limits, choice)

    def warm_up(self) -> None:
        """Draft some rounds, greedily and with noise, in one call and step by step."""
        rng = np.random.default_rng(0)
        for sampling in (
            SamplingParams(temperature=0.0),
            SamplingParams(temperature=1.0),
            SamplingParams(temperature=1.0, repetition_penalty=1.1),
        ):
            sequence = self.open([0] * (1 + _WARM_UP_ROUNDS), sampling)
            for count in range(1, _WARM_UP_ROUNDS + 1):
                numbers = rng.standard_normal((count, self._sizes.feature_size)).astype(np.float32)
                features = (numbers.view(np.uint32) >> 16).astype("<u2").tobytes()
                sequence.see_prompt(count, features[: len(features) // count])
                sequence.extend([0] * count, features)
                sequence.draft(self._limits.max_nodes)
                sequence.prepare()


class EagleSequence:
    """One sequence: rows of its tokens, and those of them that are not read yet.

    The row before token i has the position i - 1, counted from the first row that may have features.
    """

    def __init__(
        self,
        forward: EagleForward,
        sizes: HeadSizes,
        prompt: Sequence[int],
        sampling: SamplingParams,
        sigmas: FloatArray,
        limits: TreeLimits,
        choice: ChildChoice = COUPLED,
    ) -> None:
        """`sigmas` are the scales of scores at depths 1, 2, ..., as many as the tree may be deep."""
        self._forward = forward
        self._vocab_size, self._feature_size = sizes
        self._sigmas = sigmas
        self._limits = limits
        self._choice = choice
        self._prompt = prompt
        self._length = len(prompt)
        self._first_row = max(0, len(prompt) - 1 - MOST_PROMPT_FEATURES)
        # Number of the first token of the prompt whose features may still come.
        self._next_of_prompt = 1 + self._first_row
        latest = list(dict.fromkeys(reversed(prompt)))[:MOST_PROMPT_IDS]
        self._vocabulary = forward.vocabulary(latest)
        self._coupling = Coupling(sampling, sizes.vocab_size, 1.0, prompt, is_coupled=choice.is_coupled)
        self._noise = _picked_noise(sampling, self._vocabulary.ids)
        self._adds_noise = choice.is_coupled and sampling.temperature > 0
        self._cache = forward.new_cache()
        self._unread = _no_rows(sizes.feature_size)
        self._unread_prompt = _no_rows(sizes.feature_size)
        # Whether the last committed token has a row, read or not.
        self._has_root = False

    @property
    def num_cached(self) -> int:
        """Cached rows."""
        return self._cache.length

    def forget(self) -> None:
        """Drop the cache. Features are sent only once, so later rows do not see those before."""
        self._cache = self._forward.new_cache()
        self._has_root = len(self._unread.token_ids) > 0

    def extend(self, token_ids: Sequence[int], features: bytes = b"") -> None:
        """Add committed tokens, with the features of the last of them, if known; others get no row.

        Features that are not a whole number of them, or more than the tokens, count as none.
        """
        self._coupling.commit(token_ids)
        rows = _rows_of(token_ids, self._length - 1 - self._first_row, features, self._feature_size)
        self._length += len(token_ids)
        if token_ids:
            self._has_root = len(rows.positions) > 0 and int(rows.positions[-1]) == self._root_position
        self._unread = self._unread.joined(rows).part(-WINDOW)

    def see_prompt(self, first_token: int, features: bytes) -> None:
        """Add rows of the prompt, which have to come in order; others are ignored."""
        count = len(features) // (BYTES_PER_NUMBER * self._feature_size)
        token_ids = self._prompt[first_token : first_token + count]
        if first_token < self._next_of_prompt or not token_ids:
            return
        rows = _rows_of(token_ids, first_token - 1 - self._first_row, features, self._feature_size)
        self._next_of_prompt = first_token + len(token_ids)
        self._unread_prompt = self._unread_prompt.joined(rows)

    @property
    def _root_position(self) -> int:
        """Position of the last committed token's row."""
        return self._length - 2 - self._first_row

    def read(self, max_pieces: int) -> int:
        """Read at most `max_pieces` pieces; returns those left before a draft is a short job."""
        for _ in range(max_pieces):
            if len(self._unread_prompt.token_ids):
                self._forward.see(self._cache, self._unread_prompt.part(0, MOST_UNREAD))
                self._unread_prompt = self._unread_prompt.part(MOST_UNREAD)
            elif len(self._unread.token_ids) > MOST_UNREAD:
                self._forward.read(self._cache, self._unread.part(0, MOST_UNREAD))
                self._unread = self._unread.part(MOST_UNREAD)
            else:
                return 0
        of_prompt = -(-len(self._unread_prompt.token_ids) // MOST_UNREAD)
        return of_prompt + max(0, len(self._unread.token_ids) - 1) // MOST_UNREAD

    def draft(self, max_nodes: int, row_multiple: int = 1, least_probability: float = 0.0) -> TokenTree:
        """Best tree of at most `max_nodes` nodes after the committed tokens; empty if the last has no row.

        Paths are at least `least_probability` likely.
        """
        if max_nodes < 1 or not self._has_root:
            return EMPTY_TREE
        self.read(max_pieces=sys.maxsize)
        budget = min(max_nodes, self._limits.max_nodes)
        limits = replace(self._limits, max_nodes=budget, row_multiple=row_multiple)
        if least_probability > 0:
            least = max(limits.min_path_log_prob, math.log(least_probability))
            limits = replace(limits, min_path_log_prob=least)
        if self._coupling.is_noise_alone:
            noise = self._noise_rows(self._length, limits.max_steps + 1)
            search = EagleSearch(self._root_position, noise, self._sigmas, limits, self._choice.max_children)
            tree = self._forward.search(self._cache, self._vocabulary, self._unread, search, KIND)
            if tree is not None:
                self._unread = _no_rows(self._feature_size)
                return tree
        self._forward.read(self._cache, self._unread)
        self._unread = _no_rows(self._feature_size)
        return self._search(limits)

    def prepare(self) -> bool:
        """Compute noise of later positions; there is no more to do."""
        self._noise_rows(self._length, 2 * (self._limits.max_steps + 1))
        return False

    def _search(self, limits: TreeLimits) -> TokenTree:
        """Best tree in a pass per step."""
        cache = self._cache
        if cache.state is None:
            return EMPTY_TREE
        # The root's state is first.
        states = [cache.state]
        tokens: list[int] = []
        parents: list[int] = []

        def path(row: int) -> list[int]:
            above = [] if parents[row] == ROOT else path(parents[row])
            return [*above, tokens[row]]

        def expand(frontier: Frontier) -> Sequence[Children]:
            first, count = len(tokens), len(frontier.token_ids)
            tokens.extend(frontier.token_ids)
            parents.extend(frontier.parent_rows)
            mask = np.full((count, cache.length + first + count), np.float32(-np.inf))
            mask[:, : cache.length] = 0
            for offset in range(count):
                row = first + offset
                while row != ROOT:
                    mask[offset, cache.length + row] = 0
                    row = parents[row]
            depths = np.asarray(frontier.depths)
            rows = EagleRows(
                np.asarray(frontier.token_ids, np.int64),
                np.stack([states[1 + parent] for parent in frontier.parent_rows]),
                self._root_position + depths,
                mask,
            )
            found = self._forward.run(cache, cache.length + first, rows)
            states.extend(found)
            return self._children(found, depths, [path(first + offset) for offset in range(count)])

        root = self._children(cache.state[None], np.zeros(1, np.int64), [[]])[0]
        return build_tree(root, expand, limits, KIND)

    def _children(self, states: FloatArray, depths: IntArray, paths: Sequence[Sequence[int]]) -> list[Children]:
        """Children of nodes at these depths (root: 0), whose paths from the root are `paths`."""
        ids, sigmas = self._vocabulary.ids, self._sigmas[depths, None]
        logits = self._forward.score(self._vocabulary, states)
        most = self._choice.max_children
        if self._coupling.is_noise_alone:
            noise = self._noise_rows(self._length, int(depths.max()) + 1)
            scores = logits + noise[depths] if len(noise) else logits
            return [
                Children(ids[list(found.token_ids)].tolist(), found.log_probs)
                for found in top_children(scores / sigmas, _ONE, most)
            ]
        every = np.full((len(logits), self._vocab_size), np.float32(-np.inf))
        every[:, ids] = logits
        scores = self._coupling.scores(every, (self._length + depths).tolist(), paths)
        return top_children(scores / sigmas, _ONE, most)

    def _noise_rows(self, first_position: int, count: int) -> FloatArray:
        """Noise of the tokens that can be drafted [count, N]; no rows without noise."""
        if not self._adds_noise:
            return np.empty((0, len(self._vocabulary.ids)), np.float32)
        return self._noise.at(first_position, count)


def _no_rows(feature_size: int) -> CommittedRows:
    return CommittedRows(np.empty(0, np.int64), np.empty((0, feature_size), np.float32), np.empty(0, np.int64))


def _rows_of(token_ids: Sequence[int], first: int, features: bytes, size: int) -> CommittedRows:
    """Rows of tokens at positions `first`, ...: those with sound features, which belong to the last ones."""
    num_bytes = BYTES_PER_NUMBER * size
    count = len(features) // num_bytes
    if len(features) % num_bytes or count > len(token_ids):
        count = 0
    numbers = floats(np.frombuffer(features[: count * num_bytes], "<u2")).reshape(count, size)
    # False for NaN.
    is_sound = (np.abs(numbers) < _LARGEST_STATE).all(-1)
    places = np.arange(len(token_ids) - count, len(token_ids))[is_sound]
    return CommittedRows(np.asarray(token_ids, np.int64)[places], numbers[is_sound], first + places)


def _picked_noise(sampling: SamplingParams, ids: IntArray) -> NoiseRows:
    """Noise of some tokens."""
    seed, temperature = np.uint64(sampling.seed), sampling.temperature

    def fill(position: int, rows: FloatArray) -> None:
        for offset, row in enumerate(rows):
            fill_picked_noise(seed, np.uint64(position + offset), ids, temperature, row)

    return NoiseRows(len(ids), fill)
