"""Small language model: trees from its own probabilities, coupled to the request's noise.

Boosted ones (`drafter_svc/training/boost.py`) are the same, each a kind of its own.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from coppice.core.sampling import SamplingParams
from coppice.core.tree import EMPTY_TREE, ROOT, TokenTree
from coppice.draft_models.coupling import ChildChoice, Coupling
from coppice.draft_models.kernels.base import WholeSearch
from coppice.kernels.cpu.packed_linear import ROW_STEP
from coppice.search.tree_builder import Frontier, build_tree
from coppice.search.tree_limits import Children, TreeLimits
from drafter_svc.config import ON, DrafterConfig
from drafter_svc.drafters.base import AheadDraft, DrafterInfo
from drafter_svc.drafters.small_lm.sampled_lm import SampledLmSequence
from drafter_svc.model.checkpoint import (
    Calibration,
    choose_device,
    choose_forward,
    load_calibration,
    load_fingerprint,
    load_model,
)
from drafter_svc.model.draft_context import DraftContext
from drafter_svc.model.prefix_blocks import PIECE_ROWS, PrefixBlocks, PrefixKey
from drafter_svc.model.read_context import ReadContext
from drafter_svc.model.tree_cache import Forward
from drafter_svc.search.draft_ahead import AHEAD_LIMITS, drafts_ahead
from drafter_svc.search.joint_passes import JointPasses, joined

logger = logging.getLogger(__name__)

MIB = 1024 * 1024
# Most positions whose noise is computed ahead: two rounds of typical depth.
MAX_PREPARED = 32
# Fractions of right children by rank, for the shape of sampled trees, if not measured.
UNMEASURED_ACCEPTANCE = (0.6, 0.15, 0.05)
_NO_ROW = -2
NO_CHILDREN = Children((), ())
COUPLED = ChildChoice()
# Rounds of the warm-up, enough to reach every code path.
_WARM_UP_ROUNDS = 3


def load(config: DrafterConfig) -> SmallLm:
    """Load the configured checkpoint.

    Raises:
        IncompatibleError: the device, tokenizer or calibration file cannot be used.
        OSError, ValueError: the checkpoint cannot be read.
    """
    device = choose_device(config.device)
    torch.set_num_threads(config.num_threads)
    model = load_model(config.model, device)
    calibration = load_calibration(config.model)
    forward = choose_forward(model)
    ahead_steps = config.ahead_steps(on_gpu=device.type == "cuda")
    info = DrafterInfo(
        kind=config.drafter_kind,
        model=config.model,
        tokenizer_fingerprint=load_fingerprint(config.model),
        vocab_size=forward.vocab_size,
        max_length=0,
        acceptance_by_rank=calibration.acceptance_by_rank,
        drafts_ahead=ahead_steps > 0,
    )
    limits = TreeLimits(
        max_nodes=config.max_nodes,
        width=config.draft_width,
        max_steps=config.draft_steps,
        min_step_gain=config.draft_min_gain,
        min_path_log_prob=math.log(config.draft_min_probability) if config.draft_min_probability > 0 else -math.inf,
    )
    prefixes = PrefixBlocks(config.prefix_mib * MIB)
    choice = ChildChoice(config.draft_children, config.coupling == ON)
    context = config.context_tokens(calibration.context, forward.max_positions)
    # A search in one compiled call has no passes to join.
    forward = forward if forward.max_unread else joined(forward, config.draft_batch)
    return SmallLm(forward, info, calibration, limits, ahead_steps, prefixes, choice, context)


class SmallLm:
    """A loaded small language model. `limits` bounds every search; a request's budget lowers `max_nodes`."""

    def __init__(
        self,
        forward: Forward[Any],
        info: DrafterInfo,
        calibration: Calibration,
        limits: TreeLimits,
        ahead_steps: int = 0,
        prefixes: PrefixBlocks | None = None,
        choice: ChildChoice = COUPLED,
        max_context: int = 0,
    ) -> None:
        """At most `ahead_steps` passes a round draft ahead; without `prefixes` no prompts are cached.

        `max_context`: see `DraftContext`.
        """
        self.info = info
        self.prefixes = prefixes or PrefixBlocks(0)
        self._ahead_steps = ahead_steps
        self._forward = forward
        self.joint = forward if isinstance(forward, JointPasses) else None
        self._calibration = calibration
        self._limits = limits
        self._choice = choice
        self._max_context = max_context

    def open(self, prompt: Sequence[int], sampling: SamplingParams, cache_salt: str = "") -> SmallLmSequence:
        """Open a sequence; nothing is computed before the first draft."""
        temperature = sampling.temperature
        sigma = self._choice.sigma(temperature, self._calibration.sigma_at(temperature))
        coupling = Coupling(sampling, self.info.vocab_size, sigma, prompt, is_coupled=self._choice.is_coupled)
        beginning = PrefixKey(self.prefixes, cache_salt)
        max_children = self._choice.max_children
        context = DraftContext(prompt, self._max_context)
        parts = (self.info.kind, self._forward, coupling, self._limits, context, self._ahead_steps, beginning)
        return SmallLmSequence(*parts, max_children=max_children)

    def open_sampled(self, prompt: Sequence[int], sampling: SamplingParams, cache_salt: str = "") -> SampledLmSequence:
        """Open a sequence with sampled trees; nothing is computed before the first one."""
        coupling = Coupling(sampling, self.info.vocab_size, self._calibration.sigma_at(sampling.temperature), prompt)
        rates = self._calibration.acceptance_by_rank or UNMEASURED_ACCEPTANCE
        beginning = PrefixKey(self.prefixes, cache_salt)
        context = DraftContext(prompt, self._max_context)
        parts = (self._forward, coupling, sampling, self._limits, rates, self.info.kind, context, beginning)
        return SampledLmSequence(*parts)

    def warm_up(self) -> None:
        """Draft some rounds, greedily and with noise, and read prompts of every size with code of its own."""
        for temperature in (0.0, 1.0):
            sequence = self.open([0], SamplingParams(temperature=temperature))
            for _ in range(_WARM_UP_ROUNDS):
                tree = sequence.draft(self._limits.max_nodes)
                sequence.expect(tree)
                while sequence.prepare():
                    pass
                sequence.extend([*tree.token_ids[:1], 0])
                sequence.prepare()
        sampled = self.open_sampled([0], SamplingParams(temperature=1.0))
        sampled.draft(self._limits.max_nodes)
        for length in range(ROW_STEP, min(PIECE_ROWS, self._forward.max_positions) + 1, ROW_STEP):
            self.open([0] * length, SamplingParams(temperature=0.0)).draft(1)
        if self.joint is not None:
            self.joint.measure(self._limits.width)


class SmallLmSequence(ReadContext):
    """One sequence: a cache whose trunk follows the committed tokens, and the unread tokens.

    Rows computed by drafts stay, with their children, while they may follow the committed tokens. So do rows computed
    ahead, after likely outcomes of the tree under verification: the next draft starts with them if one comes true.
    """

    def __init__(
        self,
        source: str,
        forward: Forward[Any],
        coupling: Coupling,
        limits: TreeLimits,
        context: DraftContext,
        ahead_steps: int = 0,
        beginning: PrefixKey | None = None,
        max_children: int = COUPLED.max_children,
    ) -> None:
        self._source = source
        super().__init__(forward, context, coupling, beginning)
        self._max_unread = forward.max_unread
        self._max_children = max_children
        self._max_nodes = limits.max_nodes
        # Of the last draft: budgets rarely change.
        self._limits = limits
        self._ahead_steps = ahead_steps
        # Tree under verification and passes left for it; trees after its outcomes, until they are sent.
        self._expected: TokenTree | None = None
        self._steps_left = 0
        self._ahead: tuple[AheadDraft, ...] = ()
        # Children of the last committed token, once it was read.
        self._root: Children | None = None

    def extend(self, token_ids: Sequence[int], features: bytes = b"") -> None:
        """Add committed tokens; features are ignored."""
        self._expected, self._ahead = None, ()
        super().extend(token_ids)

    def _start_over(self) -> None:
        super()._start_over()
        self._root = self._expected = None

    def draft(self, max_nodes: int, row_multiple: int = 1) -> TokenTree:
        """Best tree of at most `max_nodes` nodes after the committed tokens; empty beyond the context."""
        if max_nodes < 1 or self._context.size > self._max_positions:
            return EMPTY_TREE
        self.read(max_pieces=sys.maxsize)
        self._expected = None
        budget = min(max_nodes, self._max_nodes)
        limits = self._limits
        if (limits.max_nodes, limits.row_multiple) != (budget, row_multiple):
            limits = self._limits = replace(limits, max_nodes=budget, row_multiple=row_multiple)
        tree = self._whole_search(limits)
        return self._search(limits, max_forwards=limits.max_steps) if tree is None else tree

    def prepare(self) -> bool:
        """Compute noise, read unread tokens, or take one step ahead; returns whether there is more to do."""
        self._coupling.prepare(self._context.length, min(2 * (self._limits.max_steps + 1), MAX_PREPARED))
        if self._context.size > self._max_positions:
            return False
        if self.read(max_pieces=1):
            return True
        if self._context.unread or self._root is None:
            self._read()
        return self._draft_ahead()

    @property
    def drafts_ahead(self) -> bool:
        """Whether drafting ahead is on."""
        return self._ahead_steps > 0

    def expect(self, tree: TokenTree) -> None:
        """Draft after likely outcomes of this tree from now on; ignored until the committed tokens are read."""
        context = self._context
        if not (context.unread or self._root is None or context.size > self._max_positions):
            self._expected, self._steps_left = tree, self._ahead_steps

    def ahead(self) -> tuple[AheadDraft, ...]:
        """Trees after likely outcomes, once, when all are ready."""
        drafts, self._ahead = self._ahead, ()
        return drafts

    def _draft_ahead(self) -> bool:
        """Read the likeliest unread nodes in one pass, or make the trees; returns whether there is more to do."""
        if self._expected is None:
            return False
        likeliest = sorted(self._unread(ROOT, 0.0, 1), reverse=True)[: AHEAD_LIMITS.width]
        gain = sum(math.exp(path) for path, *_ in likeliest)
        if self._steps_left and likeliest and gain >= AHEAD_LIMITS.min_step_gain:
            self._steps_left -= 1
            self._grow([node for _, *node in likeliest])
            return True
        found = self._search(AHEAD_LIMITS, max_forwards=0)
        self._ahead, self._expected = drafts_ahead(found, self._expected), None
        return False

    def _unread(self, row: int, above: float, depth: int) -> Iterator[tuple[float, int, int, int]]:
        """Unread nodes after a row: path log-probability, parent's row, token and depth."""
        if depth >= self._deepest:
            return
        children = self._read() if row == ROOT else self._cache.children(row)
        for token, log_prob in zip(*children, strict=True):
            if (path := above + log_prob) < AHEAD_LIMITS.min_path_log_prob:
                return
            if (known := self._cache.find(row, token)) is None:
                yield path, row, token, depth
            else:
                yield from self._unread(known, path, depth + 1)

    def _whole_search(self, limits: TreeLimits) -> TokenTree | None:
        """Best tree in one call, if the forward supports it; equal to that of `_search`."""
        # Noise is gathered for all possible steps.
        if not self._coupling.is_noise_alone or limits.max_steps > MAX_PREPARED:
            return None
        self._follow()
        if not 0 < len(self._context.unread) <= self._max_unread:
            self._read()
        # A child of a node at depth d has position length + d; the last committed token is the root, at depth 0.
        noise = self._coupling.noise(self._context.length, limits.max_steps + 1)
        if self._deepest <= limits.max_steps:
            limits = replace(limits, max_depth=self._deepest)
        found = self._cache.search(
            WholeSearch(self._context.unread, self._root, noise, self._coupling.sigma, limits, self._max_children)
        )
        if found is None:
            return None
        if self._context.unread:
            self._root = Children(found.root_token_ids.tolist(), found.root_log_probs.tolist())
            self._context.unread.clear()
        return TokenTree(
            token_ids=tuple(found.token_ids.tolist()),
            parents=tuple(found.parents.tolist()),
            log_probs=tuple(found.log_probs.tolist()),
            source_names=(self._source,),
        )

    @property
    def _deepest(self) -> int:
        # A node at depth d is read at position length + d - 1; the deepest nodes are not read.
        return self._max_positions - self._context.size + 1

    def _search(self, limits: TreeLimits, max_forwards: int) -> TokenTree:
        """Best tree within `limits`, from cached rows and at most `max_forwards` further passes."""
        rows: list[int] = []
        forwards_left = max_forwards

        def expand(frontier: Frontier) -> Sequence[Children]:
            nonlocal forwards_left
            parents = [ROOT if parent == ROOT else rows[parent] for parent in frontier.parent_rows]
            nodes = list(zip(parents, frontier.token_ids, strict=True))
            missing = [index for index, node in enumerate(nodes) if self._cache.find(*node) is None]
            if missing and forwards_left > 0:
                forwards_left -= 1
                self._grow([(parents[at], frontier.token_ids[at], frontier.depths[at]) for at in missing])
            found = [self._cache.find(*node) for node in nodes]
            # Nodes beyond the pass budget stay leaves; their row is never read.
            rows.extend(_NO_ROW if row is None else row for row in found)
            return [NO_CHILDREN if row is None else self._cache.children(row) for row in found]

        limits = replace(limits, max_steps=sys.maxsize, max_depth=min(limits.max_depth, self._deepest))
        return build_tree(self._read(), expand, limits, self._source)

    def _grow(self, nodes: Sequence[Sequence[int]]) -> None:
        """Read nodes in one forward pass: each its parent's row, token and depth."""
        parents, token_ids, depths = zip(*nodes, strict=True)
        logits = self._cache.grow(token_ids, parents, depths)
        positions = [self._context.length + depth for depth in depths]
        new = range(self._cache.num_rows - len(nodes), self._cache.num_rows)
        paths = [self._cache.path(row) for row in new] if self._coupling.asks_for_paths else ()
        self._cache.note(self._coupling.children(logits, positions, self._max_children, paths))

    def _read(self) -> Children:
        """Read up to the last committed token; returns its children."""
        self._follow()
        if self._context.unread:
            logits = self._cache.extend(self._context.unread)
            [self._root] = self._coupling.children(logits[None], [self._context.length], self._max_children)
            self._context.unread.clear()
        if self._root is None:
            raise RuntimeError("a sequence without tokens was asked for a draft")
        return self._root

    def _follow(self) -> None:
        """Move unread tokens that a search has read into the trunk; the root's children are known if that is all."""
        if self._context.unread:
            followed = self._cache.follow(self._context.unread)
            self._root = followed.children
            del self._context.unread[: followed.num_tokens]
