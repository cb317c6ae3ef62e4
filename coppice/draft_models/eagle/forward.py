"""Forward passes of an EAGLE-3 layer: in torch, and compiled with 8-bit weights for CPUs.

A row has a token and an input: the fused features of the target's row that the token was drawn from or, for drafted
tokens, the drafter's own state of the parent's row.

Axes as `EagleWeights` has them; R new rows, S cached rows, N tokens that can be drafted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from numba.core.errors import NumbaError
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from coppice.core.tree import TokenTree
from coppice.draft_models.eagle.checkpoint import EagleWeights
from coppice.draft_models.kernels.cpu import eagle_pass, int8_inputs
from coppice.draft_models.kernels.cpu.int8_inputs import arrange
from coppice.draft_models.kernels.cpu.int8_weights import quantise
from coppice.draft_models.kernels.cpu.llama_pass import LayerMatrices
from coppice.draft_models.kernels.cpu.tree_search import SearchLimits
from coppice.kernels.cpu.half_tables import HalfArray
from coppice.search.tree_limits import TreeLimits

logger = logging.getLogger(__name__)

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]
# Committed rows that are seen, the prompt's among them: older ones are dropped, a step of them at a time.
WINDOW = 1024
_STEP = 64
# Committed rows of one pass.
MOST_UNREAD = 64
# Rows of one draft.
MOST_DRAFTED = 256
# Of the logits' standard deviation: RMS of what compiled drafts may be off by. Wrong code is off by more than all.
_MOST_DEVIATION = 0.4
_FIRST_POSITIONS = 4096
_MATRICES = ("fusion", "qkv", "output", "gate_up", "down", "head")


class EagleRows(NamedTuple):
    """New rows of one pass: `token_ids` [R], `inputs` [R, h], `positions` [R], and `mask` [R, S + R] for attention."""

    token_ids: IntArray
    inputs: FloatArray
    positions: IntArray
    mask: FloatArray


class CommittedRows(NamedTuple):
    """New rows of committed tokens: `token_ids` [R], `features` [R, F] and `positions` [R]."""

    token_ids: IntArray
    features: FloatArray
    positions: IntArray

    def part(self, first: int, last: int | None = None) -> CommittedRows:
        """Rows from `first` to before `last`."""
        return CommittedRows(self.token_ids[first:last], self.features[first:last], self.positions[first:last])

    def joined(self, later: CommittedRows) -> CommittedRows:
        """These rows and later ones."""
        return CommittedRows(
            np.concatenate([self.token_ids, later.token_ids]),
            np.concatenate([self.features, later.features]),
            np.concatenate([self.positions, later.positions]),
        )


class DraftVocabulary(NamedTuple):
    """Tokens that can be drafted: ids [N], and the output rows of those beyond the draft vocabulary, in any form."""

    ids: IntArray
    extra: Any


class EagleSearch(NamedTuple):
    """A search after the last committed row, for requests whose scores are logits plus noise.

    `noise` [1 + steps, N] is added to the logits of children of nodes at depth 0, 1, ...; it has no rows at temperature
    0. `sigmas` [1 + steps] are the scales of their softmax. `root_position` is the last committed row's.
    """

    root_position: int
    noise: FloatArray
    sigmas: FloatArray
    limits: TreeLimits
    max_children: int


@dataclass(slots=True)
class EagleCache:
    """Keys and values [2, K, capacity, D] with `length` committed rows, and the last one's `state` [h], if any.

    The first `num_prompt` rows are the prompt's.
    """

    kv: Tensor
    length: int = 0
    num_prompt: int = 0
    state: FloatArray | None = None


class EagleForward(Protocol):
    """A way to run the layer."""

    weights: EagleWeights

    def new_cache(self) -> EagleCache:
        """An empty cache."""
        ...

    def vocabulary(self, further_ids: Sequence[int]) -> DraftVocabulary:
        """The draft vocabulary, and these ids of the target's output layer, if that is at hand."""
        ...

    def read(self, cache: EagleCache, rows: CommittedRows) -> None:
        """Append at most MOST_UNREAD rows, each after the ones before it."""
        ...

    def see(self, cache: EagleCache, rows: CommittedRows) -> None:
        """Insert keys and values of at most MOST_UNREAD rows of the prompt after those that are there."""
        ...

    def run(self, cache: EagleCache, first: int, rows: EagleRows) -> FloatArray:
        """Write rows from `first` on, which do not count as committed; returns their states [R, h]."""
        ...

    def score(self, vocabulary: DraftVocabulary, states: FloatArray) -> FloatArray:
        """Logits [R, N] of states [R, h]."""
        ...

    def search(
        self, cache: EagleCache, vocabulary: DraftVocabulary, unread: CommittedRows, search: EagleSearch, source: str
    ) -> TokenTree | None:
        """Append rows as `read` does, and find the best tree after them; None if that is to be done step by step."""
        ...


def make_room(cache: EagleCache, num_rows: int) -> None:
    """Drop the oldest committed rows so that with `num_rows` more there are at most WINDOW."""
    if (excess := cache.length + num_rows - WINDOW) <= 0:
        return
    dropped = min(cache.length, -(-excess // _STEP) * _STEP)
    kept = cache.length - dropped
    cache.kv[:, :, :kept] = cache.kv[:, :, dropped : cache.length].clone()
    cache.length = kept
    cache.num_prompt = max(0, cache.num_prompt - dropped)


def open_place(cache: EagleCache, num_rows: int) -> int:
    """Place of `num_rows` more rows of the prompt, which count as there; those of generated tokens move."""
    make_room(cache, num_rows)
    first, last = cache.num_prompt, cache.length
    cache.kv[:, :, first + num_rows : last + num_rows] = cache.kv[:, :, first:last].clone()
    cache.num_prompt += num_rows
    cache.length += num_rows
    return first


class RotaryTable:
    """Factors of rotary positions: cosines and signed sines [positions, D], which grow as needed. For any thread."""

    def __init__(self, rotary: LlamaRotaryEmbedding) -> None:
        self._rotary = rotary
        self._factors = self._computed(_FIRST_POSITIONS)

    def up_to(self, position: int) -> tuple[Tensor, Tensor]:
        """Factors of at least the positions up to this one."""
        factors = self._factors
        if position >= len(factors[0]):
            factors = self._factors = self._computed(2 * (1 + position))
        return factors

    def _computed(self, count: int) -> tuple[Tensor, Tensor]:
        angles = torch.outer(torch.arange(count).double(), self._rotary.inv_freq.double().cpu())
        scale = float(self._rotary.attention_scaling)
        cos = torch.cat([angles.cos(), angles.cos()], -1).mul(scale).float()
        return cos, torch.cat([-angles.sin(), angles.sin()], -1).mul(scale).float()


class TorchEagle:
    """The layer in tensor operations, in single precision on a CPU."""

    def __init__(self, weights: EagleWeights, device: torch.device) -> None:
        self.weights = weights
        self._device = device
        config = weights.config
        heads = weights.heads
        self._heads, self._kv_heads, self._size = heads.queries, heads.keys, heads.size
        self._eps = float(config.rms_norm_eps)
        self._rotary = RotaryTable(LlamaRotaryEmbedding(config))
        names = ("fusion", "token_norm", "state_norm", "mlp_norm", "norm", "qkv", "output", "gate_up", "down")
        self._of: dict[str, Tensor] = {name: getattr(weights, name).to(device) for name in names}
        self._feature_norm = None if weights.feature_norm is None else weights.feature_norm.to(device)
        self._embedding = weights.embedding.to(device)
        self._head = weights.head.to(device).float()

    def new_cache(self) -> EagleCache:
        """See `EagleForward`."""
        shape = (2, self._kv_heads, WINDOW + MOST_DRAFTED, self._size)
        return EagleCache(torch.zeros(shape, device=self._device))

    def vocabulary(self, further_ids: Sequence[int]) -> DraftVocabulary:
        """See `EagleForward`."""
        return _vocabulary(self.weights, further_ids, lambda rows: rows.to(self._device))

    @torch.inference_mode()
    def read(self, cache: EagleCache, rows: CommittedRows) -> None:
        """See `EagleForward`."""
        count = len(rows.token_ids)
        if not count:
            return
        make_room(cache, count)
        mask = np.zeros((count, cache.length + count), np.float32)
        mask[:, cache.length :][np.triu_indices(count, 1)] = -np.inf
        states = self.run(cache, cache.length, EagleRows(rows.token_ids, self._fused(rows), rows.positions, mask))
        cache.length += count
        cache.state = states[-1]

    @torch.inference_mode()
    def see(self, cache: EagleCache, rows: CommittedRows) -> None:
        """See `EagleForward`."""
        if not len(rows.token_ids):
            return
        first = open_place(cache, len(rows.token_ids))
        inputs = torch.from_numpy(self._fused(rows)).to(self._device)
        self._keep(cache, first, rows.token_ids, self._norm(inputs, "state_norm"), rows.positions)

    @torch.inference_mode()
    def run(self, cache: EagleCache, first: int, rows: EagleRows) -> FloatArray:
        """See `EagleForward`."""
        count, last = len(rows.token_ids), first + len(rows.token_ids)
        inputs = torch.from_numpy(rows.inputs).to(self._device)
        normed = self._norm(inputs, "state_norm")
        hidden = normed if self.weights.norm_before_residual else inputs
        query = self._keep(cache, first, rows.token_ids, normed, rows.positions)
        keys, values = (part[:, :last].repeat_interleave(self._heads // self._kv_heads, 0) for part in cache.kv)
        mask = torch.from_numpy(rows.mask).to(self._device)
        weights = (query.transpose(0, 1) @ keys.transpose(1, 2) / self._size**0.5 + mask).softmax(-1)
        seen = (weights @ values).transpose(0, 1).reshape(count, -1)
        hidden = hidden + F.linear(seen, self._of["output"])
        gate, up = F.linear(self._norm(hidden, "mlp_norm"), self._of["gate_up"]).chunk(2, -1)
        hidden = hidden + F.linear(F.silu(gate) * up, self._of["down"])
        states: FloatArray = hidden.cpu().numpy()
        return states

    @torch.inference_mode()
    def score(self, vocabulary: DraftVocabulary, states: FloatArray) -> FloatArray:
        """See `EagleForward`."""
        final = self._norm(torch.from_numpy(states).to(self._device), "norm")
        logits: FloatArray = torch.cat([final @ self._head.T, final @ vocabulary.extra.T], -1).cpu().numpy()
        return logits

    def search(
        self, cache: EagleCache, vocabulary: DraftVocabulary, unread: CommittedRows, search: EagleSearch, source: str
    ) -> TokenTree | None:
        """None: searches are made step by step."""

    def _keep(self, cache: EagleCache, first: int, token_ids: IntArray, normed: Tensor, positions: IntArray) -> Tensor:
        """Write keys and values of rows from `first` on; returns their queries [R, H, D]."""
        count, last = len(token_ids), first + len(token_ids)
        tokens = self._norm(F.embedding(self._on_device(token_ids), self._embedding).float(), "token_norm")
        qkv = F.linear(torch.cat([tokens, normed], -1), self._of["qkv"]).view(count, -1, self._size)
        turned, value = qkv.split([self._heads + self._kv_heads, self._kv_heads], 1)
        at, factors = torch.from_numpy(positions), self._rotary.up_to(int(positions.max()))
        cos, signed_sin = (table[at][:, None].to(self._device) for table in factors)
        turned = turned * cos + turned.roll(self._size // 2, -1) * signed_sin
        query: Tensor
        query, key = turned.split([self._heads, self._kv_heads], 1)
        cache.kv[0, :, first:last], cache.kv[1, :, first:last] = key.transpose(0, 1), value.transpose(0, 1)
        return query

    def _fused(self, rows: CommittedRows) -> FloatArray:
        features = torch.from_numpy(rows.features).to(self._device)
        if self._feature_norm is not None:
            features = F.rms_norm(features, features.shape[-1:], self._feature_norm, self._eps)
        inputs: FloatArray = F.linear(features, self._of["fusion"]).cpu().numpy()
        return inputs

    def _norm(self, rows: Tensor, name: str) -> Tensor:
        return F.rms_norm(rows, rows.shape[-1:], self._of[name], self._eps)

    def _on_device(self, array: IntArray) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _vocabulary(weights: EagleWeights, further_ids: Sequence[int], form: Callable[[Tensor], Any]) -> DraftVocabulary:
    """The draft vocabulary and further ids, whose output rows [n, h] get a `form`."""
    own = weights.draft_ids.numpy()
    table = weights.target_output
    more = np.setdiff1d(np.asarray(further_ids, np.int64), own) if table is not None else np.empty(0, np.int64)
    rows = weights.head[:0] if table is None else table.index_select(0, torch.from_numpy(more))
    return DraftVocabulary(np.concatenate([own, more]), form(rows.float()))


class CompiledEagle:
    """The layer compiled with 8-bit weights, and whole drafts in one call.

    `rounds_inputs` also rounds the matrices' inputs to 8 bits, which needs `int8_inputs.is_available()`.
    """

    def __init__(self, weights: EagleWeights, *, rounds_inputs: bool) -> None:
        """Quantise the weights."""

        def matrix(weight: Tensor) -> Any:
            quantised = quantise(weight.float().contiguous().numpy())
            return arrange(quantised) if rounds_inputs else quantised

        # Matrices are kept as quantised ones alone; their widths stay.
        self.weights = replace(weights, **{name: getattr(weights, name)[:0].clone() for name in _MATRICES})
        self._matrix = matrix
        config = weights.config
        self._rotary = RotaryTable(LlamaRotaryEmbedding(config))
        self._shape = (2, weights.heads.keys, WINDOW + MOST_DRAFTED, weights.heads.size)
        self._sizes = eagle_pass.EagleSizes(
            weights.heads.queries, float(config.rms_norm_eps), weights.norm_before_residual
        )
        embedding: HalfArray = weights.embedding.contiguous().view(torch.int16).numpy().view(np.uint16)
        no_norm = np.empty(0, np.float32)
        self._matrices = eagle_pass.EagleMatrices(
            embedding=embedding,
            feature_norm=no_norm if weights.feature_norm is None else weights.feature_norm.numpy(),
            fusion=matrix(weights.fusion),
            token_norm=weights.token_norm.numpy(),
            state_norm=weights.state_norm.numpy(),
            layer=LayerMatrices(
                matrix(weights.qkv),
                matrix(weights.output),
                weights.mlp_norm.numpy(),
                matrix(weights.gate_up),
                matrix(weights.down),
            ),
            norm=weights.norm.numpy(),
            head=matrix(weights.head),
        )

    def new_cache(self) -> EagleCache:
        """See `EagleForward`."""
        return EagleCache(torch.zeros(self._shape))

    def vocabulary(self, further_ids: Sequence[int]) -> DraftVocabulary:
        """See `EagleForward`."""
        return _vocabulary(self.weights, further_ids, self._matrix)

    def read(self, cache: EagleCache, rows: CommittedRows) -> None:
        """See `EagleForward`."""
        if not len(rows.token_ids):
            return
        make_room(cache, len(rows.token_ids))
        tables = self._tables(int(rows.positions.max()))
        states = eagle_pass.read_eagle(self._matrices, self._sizes, cache.kv.numpy(), cache.length, *rows, *tables)
        cache.length += len(rows.token_ids)
        cache.state = states[-1]

    def see(self, cache: EagleCache, rows: CommittedRows) -> None:
        """See `EagleForward`."""
        if not len(rows.token_ids):
            return
        first = open_place(cache, len(rows.token_ids))
        tables = self._tables(int(rows.positions.max()))
        eagle_pass.see_eagle(self._matrices, self._sizes, cache.kv.numpy(), first, *rows, *tables)

    def run(self, cache: EagleCache, first: int, rows: EagleRows) -> FloatArray:
        """See `EagleForward`."""
        tables = self._tables(int(rows.positions.max()))
        return eagle_pass.run_eagle(
            self._matrices,
            self._sizes,
            cache.kv.numpy(),
            first,
            rows.token_ids,
            rows.inputs,
            *tables,
            rows.positions,
            rows.mask,
        )

    def score(self, vocabulary: DraftVocabulary, states: FloatArray) -> FloatArray:
        """See `EagleForward`."""
        return eagle_pass.score_states(self._matrices, vocabulary.extra, states, self._sizes.eps)

    def search(
        self, cache: EagleCache, vocabulary: DraftVocabulary, unread: CommittedRows, search: EagleSearch, source: str
    ) -> TokenTree | None:
        """See `EagleForward`."""
        count, limits = len(unread.token_ids), search.limits
        make_room(cache, count)
        state = np.empty(len(self._matrices.norm), np.float32) if cache.state is None else cache.state
        found = eagle_pass.search_eagle(
            self._matrices,
            self._sizes,
            vocabulary.extra,
            vocabulary.ids,
            cache.kv.numpy(),
            cache.length,
            state,
            *unread,
            search.root_position,
            *self._tables(search.root_position + limits.max_steps),
            search.noise,
            search.sigmas,
            SearchLimits.of(limits, min(search.max_children, len(vocabulary.ids))),
        )
        cache.length += count
        cache.state = found.state
        return TokenTree(
            token_ids=tuple(vocabulary.ids[found.places].tolist()),
            parents=tuple(found.parents.tolist()),
            log_probs=tuple(found.log_probs.tolist()),
            source_names=(source,),
        )

    def _tables(self, last_position: int) -> tuple[FloatArray, FloatArray]:
        cos, signed_sin = self._rotary.up_to(last_position)
        return cos.numpy(), signed_sin.numpy()


def choose_eagle_forward(weights: EagleWeights, device: torch.device) -> EagleForward:
    """The compiled pass on a CPU if it works and is close enough to the one in torch, else the latter.

    Drafts are hints: logits in 8 bits may cost a little acceptance, never a wrong token. They are compared as a whole,
    since the probe's states are noise, on which single logits of a sound head are off by more than one.
    """
    plain = TorchEagle(weights, device)
    if device.type != "cpu":
        return plain
    expected = probe_eagle(plain)
    bound = _MOST_DEVIATION * max(1.0, float(expected.std()))
    # An unsuitable compiler must not stop the service.
    try:
        for rounds_inputs in (True, False) if int8_inputs.is_available() else (False,):
            forward = CompiledEagle(weights, rounds_inputs=rounds_inputs)
            deviation = float(np.sqrt(np.square(probe_eagle(forward) - expected).mean()))
            if deviation <= bound:
                logger.info("compiled drafts, logits off by %.2g", deviation)
                return forward
            logger.warning("compiled drafts have logits off by %.2g, more than %.2g", deviation, bound)
    except (NumbaError, RuntimeError, OSError) as error:
        logger.warning("compiling drafts failed: %s", error)
    logger.warning("drafts are not compiled and slower")
    return plain


def probe_eagle(forward: EagleForward) -> FloatArray:
    """Logits [rows, N] after some committed rows, a prompt's among them, and of two drafted ones after the last."""
    weights, rng = forward.weights, np.random.default_rng(0)
    cache = forward.new_cache()
    for first in (6, 0, 12):
        tokens = rng.integers(0, weights.vocab_size, 6)
        features = rng.standard_normal((6, weights.feature_size)).astype(np.float32)
        take = forward.read if first else forward.see
        take(cache, CommittedRows(tokens, features, np.arange(first, first + 6)))
    assert cache.state is not None
    vocabulary = forward.vocabulary(range(min(3, weights.vocab_size)))
    root = forward.score(vocabulary, cache.state[None])
    mask = np.zeros((2, cache.length + 2), np.float32)
    mask[[0, 1], [-1, -2]] = -np.inf
    tokens = vocabulary.ids[:2] if len(vocabulary.ids) > 1 else np.repeat(vocabulary.ids, 2)
    rows = EagleRows(tokens, np.stack([cache.state] * 2), np.full(2, cache.length), mask)
    return np.concatenate([root, forward.score(vocabulary, forward.run(cache, cache.length, rows))])
