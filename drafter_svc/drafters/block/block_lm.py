"""Base of drafters that predict a block of tokens in one pass: semi-autoregressive and diffusion.

A pass has the unread committed tokens, which are cached, and then the block's rows, which are not. Its outputs are
marginals: one distribution per depth, whatever the ancestors. They are coupled to the request's noise by position
before children are chosen; the tree is the best under them. With a transition in the checkpoint, a token's scores also
depend on its parent in the tree.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch

from coppice.core.denoising import Denoising
from coppice.core.errors import IncompatibleError
from coppice.core.sampling import SamplingParams
from coppice.core.tree import EMPTY_TREE, TokenTree
from coppice.draft_models.coupling import ChildChoice, Coupling
from coppice.search.likeliest_tokens import top_children
from coppice.search.marginal_tree import marginal_tree
from coppice.search.transition_scores import TransitionScores
from coppice.search.transition_tree import transition_tree
from coppice.search.tree_limits import Children, TreeLimits
from drafter_svc.config import ON, DrafterConfig
from drafter_svc.drafters.base import DrafterInfo
from drafter_svc.drafters.block.checkpoint import BlockCalibration
from drafter_svc.drafters.block.transition import load_transition
from drafter_svc.model.checkpoint import choose_device, choose_forward, load_fingerprint, load_model
from drafter_svc.model.draft_context import DraftContext
from drafter_svc.model.hf_forward import PlainForward
from drafter_svc.model.prefix_blocks import PrefixBlocks, PrefixKey
from drafter_svc.model.read_context import ReadContext
from drafter_svc.model.tree_cache import FloatArray, Forward
from drafter_svc.search.joint_passes import JointPasses, joined

MIB = 1024 * 1024
# Rounds of the warm-up, enough to reach every code path.
_WARM_UP_ROUNDS = 3
_ONE = np.float32(1)
COUPLED = ChildChoice()

# One pass over a block of ids; returns the children of the last committed token, then of each row of the block.
Look = Callable[[Sequence[int]], list[Children]]


class BlockKind(Protocol):
    """A kind's way to fill a block."""

    @property
    def sees_all(self) -> bool:
        """Whether a block's rows also see later rows of the block."""

    @property
    def max_masks(self) -> int:
        """Most rows of a block."""

    def num_masks(self, max_nodes: int) -> int:
        """Rows of the block for a tree of at most `max_nodes` nodes."""

    def predict(self, look: Look, num_masks: int) -> list[Children]:
        """Children at each of 1 + `num_masks` depths."""

    def as_asked(self, denoising: Denoising) -> BlockKind:
        """This kind with the request's denoising settings, if it denoises."""


def load_block_lm(
    config: DrafterConfig,
    kind: str,
    calibration: BlockCalibration,
    make: Callable[[tuple[int, ...]], BlockKind],
) -> BlockLm:
    """Load the configured checkpoint; `make` creates the block kind from mask ids.

    Raises:
        IncompatibleError: the device, tokenizer or model cannot be used.
        OSError, ValueError: the checkpoint cannot be read.
    """
    device = choose_device(config.device)
    torch.set_num_threads(config.num_threads)
    model = load_model(config.model, device)
    forward = choose_forward(model)
    vocab_size = forward.vocab_size - calibration.num_masks
    if vocab_size < 1:
        raise IncompatibleError(f"{config.model} has {forward.vocab_size} embeddings, no more than it says are masks")
    block = make(tuple(range(vocab_size, forward.vocab_size)))
    if block.sees_all and isinstance(forward, PlainForward):
        raise IncompatibleError(f"the model of {config.model} takes no mask, which a block that sees all of it needs")
    info = DrafterInfo(
        kind=kind,
        model=config.model,
        tokenizer_fingerprint=load_fingerprint(config.model),
        vocab_size=vocab_size,
        max_length=0,
        acceptance_by_rank=calibration.acceptance_by_rank,
    )
    limits = TreeLimits(
        max_nodes=config.max_nodes,
        min_path_log_prob=math.log(config.draft_min_probability) if config.draft_min_probability > 0 else -math.inf,
    )
    choice = ChildChoice(config.draft_children, config.coupling == ON)
    prefixes = PrefixBlocks(config.prefix_mib * MIB)
    # A block that sees all of itself is not generated from left to right.
    transition = None if block.sees_all else load_transition(config.model, model, vocab_size)
    context = config.context_tokens(calibration.context, forward.max_positions)
    forward = joined(forward, config.draft_batch)
    return BlockLm(forward, info, calibration, block, limits, prefixes, choice, transition, context)


class BlockLm:
    """A loaded drafter. `limits` bounds every tree; a request's own budget lowers `max_nodes`."""

    def __init__(
        self,
        forward: Forward[Any],
        info: DrafterInfo,
        calibration: BlockCalibration,
        block: BlockKind,
        limits: TreeLimits,
        prefixes: PrefixBlocks | None = None,
        choice: ChildChoice = COUPLED,
        transition: TransitionScores | None = None,
        max_context: int = 0,
    ) -> None:
        """Without `prefixes` no prompts are cached; `transition` scores a token given its parent.

        `max_context`: see `DraftContext`.
        """
        self.info = info
        self.prefixes = prefixes or PrefixBlocks(0)
        self._forward = forward
        self.joint = forward if isinstance(forward, JointPasses) else None
        self._calibration = calibration
        self._block = block
        self._limits = limits
        self._choice = choice
        self._transition = transition
        self._max_context = max_context

    def open(self, prompt: Sequence[int], sampling: SamplingParams, cache_salt: str = "") -> BlockLmSequence:
        """Open a sequence; nothing is computed before the first draft."""
        return self._open(self._block, prompt, sampling, cache_salt)

    def open_denoising(
        self, prompt: Sequence[int], sampling: SamplingParams, denoising: Denoising, cache_salt: str = ""
    ) -> BlockLmSequence:
        """Like `open`, with the requested block size and passes."""
        return self._open(self._block.as_asked(denoising), prompt, sampling, cache_salt)

    def _open(
        self, block: BlockKind, prompt: Sequence[int], sampling: SamplingParams, cache_salt: str
    ) -> BlockLmSequence:
        # Scales differ by depth, so scores are divided by them here and the coupling's scale is 1.
        choice, temperature = self._choice, sampling.temperature
        coupling = Coupling(sampling, self.info.vocab_size, 1.0, prompt, is_coupled=choice.is_coupled)
        calibrated = self._calibration.sigmas_at(temperature, 1 + block.max_masks)
        sigmas = np.asarray([choice.sigma(temperature, sigma) for sigma in calibrated], np.float32)
        beginning, context = PrefixKey(self.prefixes, cache_salt), DraftContext(prompt, self._max_context)
        limits, max_children = self._limits, choice.max_children
        parts = self._forward, beginning, self.info, block, coupling, sigmas, limits, context, max_children
        return BlockLmSequence(*parts, self._transition)

    def warm_up(self) -> None:
        """Draft some rounds, greedily and with noise, and measure how many drafts are best made jointly."""
        for temperature in (0.0, 1.0):
            sequence = self.open([0], SamplingParams(temperature=temperature))
            for _ in range(_WARM_UP_ROUNDS):
                tree = sequence.draft(self._limits.max_nodes)
                sequence.extend([*tree.token_ids[:1], 0])
                sequence.prepare()
        if self.joint is not None:
            # The bonus token, and a block.
            self.joint.measure(1 + self._block.num_masks(self._limits.max_nodes))


class BlockLmSequence(ReadContext):
    """One sequence: cache of the committed tokens, unread tokens, and marginals after them."""

    def __init__(
        self,
        forward: Forward[Any],
        beginning: PrefixKey,
        info: DrafterInfo,
        block: BlockKind,
        coupling: Coupling,
        sigmas: FloatArray,
        limits: TreeLimits,
        context: DraftContext,
        max_children: int = COUPLED.max_children,
        transition: TransitionScores | None = None,
    ) -> None:
        super().__init__(forward, context, coupling, beginning)
        self._transition = transition
        self._info = info
        self._block = block
        self._sigmas = sigmas
        self._max_children = max_children
        self._limits = limits
        # After the last committed token: its children, and those at every depth.
        self._root: Children | None = None
        self._marginals: list[Children] = []
        # Scores [rows, vocab] of the marginals below the root's.
        self._said: FloatArray = np.empty((0, info.vocab_size), np.float32)

    def _start_over(self) -> None:
        super()._start_over()
        self._root = None

    def draft(self, max_nodes: int, row_multiple: int = 1) -> TokenTree:
        """Best tree of at most `max_nodes` nodes after the committed tokens; empty beyond the context."""
        if max_nodes < 1 or self._context.size > self._max_positions:
            return EMPTY_TREE
        self.read(max_pieces=sys.maxsize)
        budget = min(max_nodes, self._limits.max_nodes)
        # The block's rows have the positions after the last committed token.
        num_masks = min(self._block.num_masks(budget), self._max_positions - self._context.size)
        if self._context.unread or len(self._marginals) != 1 + num_masks:
            self._marginals = self._block.predict(self._look, num_masks)
        limits = replace(self._limits, max_nodes=budget, row_multiple=row_multiple)
        if (transition := self._transition) is None:
            return marginal_tree(self._marginals, limits, self._info.kind)
        # Scores from the masks, and the transition from the nodes' parents.
        arguments = self._marginals[0], transition, self._said, self._sigmas[1 : 1 + num_masks]
        return transition_tree(*arguments, limits, self._max_children, self._info.kind)

    def prepare(self) -> bool:
        """Compute noise and read a piece of a long prompt; returns whether more is left to read."""
        self._coupling.prepare(self._context.length, 2 * (1 + self._block.max_masks))
        return self.read(max_pieces=1) > 0

    def _look(self, block: Sequence[int]) -> list[Children]:
        """One pass over unread tokens and a block; returns the children at depth 1, then of each block row."""
        logits = self._cache.look(self._context.unread, block, sees_all=self._block.sees_all)
        self._context.unread.clear()
        # With unread tokens, the root's row is included.
        first = 1 + len(block) - len(logits)
        depths = np.arange(first, 1 + len(block))
        children: list[Children] = []
        if len(logits):
            scores = self._coupling.scores(logits[:, : self._info.vocab_size], (self._context.length + depths).tolist())
            self._said = scores[len(scores) - len(block) :]
            children = top_children(scores / self._sigmas[depths, None], _ONE, self._max_children)
        if first == 0:
            self._root = children.pop(0)
        if self._root is None:
            raise RuntimeError("a sequence without tokens was asked for a draft")
        return [self._root, *children]
