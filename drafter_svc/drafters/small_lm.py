"""The small language model: a tree from its own probabilities, coupled to the request's noise."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from coppice.errors import IncompatibleError
from coppice.sampling import SamplingParams
from coppice.tree import EMPTY_TREE, TokenTree
from drafter_svc.config import DrafterConfig
from drafter_svc.coupling import Coupling
from drafter_svc.drafters.base import DrafterInfo
from drafter_svc.drafters.checkpoint import choose_forward, load_calibration, load_fingerprint, load_model
from drafter_svc.drafters.tree_cache import FloatArray, Forward, TreeCache
from drafter_svc.tree_builder import Children, Frontier, TreeLimits, build_tree

logger = logging.getLogger(__name__)

KIND = "small-lm"
# Most children of one node that are looked at.
MAX_CHILDREN = 16
# Most positions whose noise is computed ahead: two rounds of a usual depth.
MAX_PREPARED = 16
# Tokens that the warm-up commits, enough to reach every path through the code.
_WARM_UP_ROUNDS = 3


def load(config: DrafterConfig) -> SmallLm:
    """Load the configured checkpoint.

    Raises:
        IncompatibleError: the device, tokenizer or calibration file cannot be used.
        OSError, ValueError: the checkpoint cannot be read.
    """
    device = _device(config.device)
    torch.set_num_threads(config.num_threads)
    model = load_model(config.model, device)
    calibration = load_calibration(config.model)
    forward = choose_forward(model)
    info = DrafterInfo(
        kind=KIND,
        model=config.model,
        tokenizer_fingerprint=load_fingerprint(config.model),
        vocab_size=forward.vocab_size,
        max_length=forward.max_positions,
        acceptance_by_rank=calibration.acceptance_by_rank,
    )
    limits = TreeLimits(
        max_nodes=config.max_nodes,
        width=config.draft_width,
        max_steps=config.draft_steps,
        min_step_gain=config.draft_min_gain,
    )
    return SmallLm(forward, info, calibration.sigma, limits)


class SmallLm:
    """A loaded small language model. `limits` bounds every search; a request's own budget lowers `max_nodes`."""

    def __init__(self, forward: Forward[Any], info: DrafterInfo, sigma: float, limits: TreeLimits) -> None:
        self.info = info
        self._forward = forward
        self._sigma = sigma
        self._limits = limits

    def open(self, prompt: Sequence[int], sampling: SamplingParams) -> SmallLmSequence:
        """Start a sequence; nothing is computed before the first draft."""
        coupling = Coupling(sampling, self.info.vocab_size, self._sigma, prompt)
        return SmallLmSequence(self._forward, coupling, self._limits, prompt)

    def warm_up(self) -> None:
        """Draft a few rounds, greedily and with noise."""
        for temperature in (0.0, 1.0):
            sequence = self.open([0], SamplingParams(temperature=temperature))
            for _ in range(_WARM_UP_ROUNDS):
                tree = sequence.draft(self._limits.max_nodes)
                sequence.extend([*tree.token_ids[:1], 0])
                sequence.prepare()


class SmallLmSequence:
    """One sequence: a cache whose trunk follows the committed tokens, and the tokens that it has not read yet."""

    def __init__(self, forward: Forward[Any], coupling: Coupling, limits: TreeLimits, prompt: Sequence[int]) -> None:
        self._cache = TreeCache(forward)
        self._max_positions = forward.max_positions
        self._coupling = coupling
        self._limits = limits
        self._unread = list(prompt)
        self._length = len(prompt)
        # Logits behind the last committed token, once it was read.
        self._root_logits: FloatArray | None = None

    def extend(self, token_ids: Sequence[int], features: bytes = b"") -> None:
        """Take in committed tokens; features are not needed."""
        self._coupling.commit(token_ids)
        self._unread.extend(token_ids)
        self._length += len(token_ids)

    def draft(self, max_nodes: int) -> TokenTree:
        """The best tree of at most `max_nodes` nodes behind the committed tokens; empty beyond the context."""
        if max_nodes < 1 or self._length > self._max_positions:
            return EMPTY_TREE
        max_nodes = min(max_nodes, self._limits.max_nodes)
        num_children = min(max_nodes, MAX_CHILDREN)
        first = self._length

        def expand(frontier: Frontier) -> Sequence[Children]:
            logits = self._cache.grow(*frontier)
            return self._coupling.children(logits, [first + depth for depth in frontier.depths], num_children)

        [root] = self._coupling.children(self._read()[None], [first], num_children)
        limits = TreeLimits(
            max_nodes=max_nodes,
            width=self._limits.width,
            max_steps=self._limits.max_steps,
            # A node at depth d is read at position length + d - 1; its children need no reading.
            max_depth=self._max_positions - self._length + 1,
            min_step_gain=self._limits.min_step_gain,
        )
        return build_tree(root, expand, limits, KIND)

    def prepare(self) -> None:
        """Compute the noise that the next two rounds can ask for, and read what no draft has read yet."""
        if self._unread and self._length <= self._max_positions:
            self._read()
        self._coupling.prepare(self._length, min(2 * (self._limits.max_steps + 1), MAX_PREPARED))

    def _read(self) -> FloatArray:
        """Bring the cache up to the last committed token; returns the logits [vocab] behind it."""
        # The last token is always read anew: a tree row's logits are not kept.
        followed = self._cache.follow(self._unread[:-1])
        if self._unread or self._root_logits is None:
            self._root_logits = self._cache.extend(self._unread[followed:])
            self._unread.clear()
        return self._root_logits


def _device(name: str) -> torch.device:
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise IncompatibleError("DEVICE is cuda, but torch finds no CUDA device")
    if name == "auto":
        name = "cuda" if available else "cpu"
    return torch.device(name)
