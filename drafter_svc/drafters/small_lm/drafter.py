"""A small language model: a tree from its own probabilities, coupled to the request's noise.

So are boosted ones (`drafter_svc/training/boost.py`), each a kind of its own.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from coppice.core.sampling import SamplingParams
from coppice.core.tree import EMPTY_TREE, ROOT, TokenTree
from coppice.kernels.cpu.packed_linear import ROW_STEP
from coppice.search.tree_builder import Frontier, build_tree
from coppice.search.tree_limits import Children, TreeLimits
from drafter_svc.config import ON, DrafterConfig
from drafter_svc.drafters.base import AheadDraft, DrafterInfo
from drafter_svc.drafters.small_lm.sampled_lm import SampledLmSequence
from drafter_svc.kernels.base import WholeSearch
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
from drafter_svc.search.ahead_pace import AheadPace, RoundLengths
from drafter_svc.search.coupling import ChildChoice, Coupling
from drafter_svc.search.joint_passes import JointPasses, joined
from drafter_svc.search.known_tree import known_tree
from drafter_svc.search.outcome_search import DraftAhead, OutcomeSearch, Row

logger = logging.getLogger(__name__)

MIB = 1024 * 1024
# Most positions whose noise is computed ahead: two rounds of a usual depth.
MAX_PREPARED = 32
# Shares of right children by rank that the shape of sampled trees is planned with where none were measured.
UNMEASURED_ACCEPTANCE = (0.6, 0.15, 0.05)
_NO_ROW = -2
NO_CHILDREN = Children((), ())
COUPLED = ChildChoice()
# Tokens that the warm-up commits, enough to reach every path through the code.
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
    ahead = DraftAhead(config.ahead_steps(on_gpu=device.type == "cuda"))
    info = DrafterInfo(
        kind=config.drafter_kind,
        model=config.model,
        tokenizer_fingerprint=load_fingerprint(config.model),
        vocab_size=forward.vocab_size,
        max_length=0,
        acceptance_by_rank=calibration.acceptance_by_rank,
        drafts_ahead=ahead.max_steps > 0,
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
    # A search in one compiled call asks for no passes that could be joined.
    forward = forward if forward.max_unread else joined(forward, config.draft_batch)
    return SmallLm(forward, info, calibration, limits, ahead, prefixes, choice, context)


NO_DRAFT_AHEAD = DraftAhead()


class SmallLm:
    """A loaded small language model. `limits` bounds every search; a request's own budget lowers `max_nodes`."""

    def __init__(
        self,
        forward: Forward[Any],
        info: DrafterInfo,
        calibration: Calibration,
        limits: TreeLimits,
        ahead: DraftAhead = NO_DRAFT_AHEAD,
        prefixes: PrefixBlocks | None = None,
        choice: ChildChoice = COUPLED,
        max_context: int = 0,
    ) -> None:
        """Without `prefixes` nothing of prompts is kept. A sequence's `max_context`: see `DraftContext`."""
        self.info = info
        self.prefixes = prefixes or PrefixBlocks(0)
        self._ahead = ahead
        self._forward = forward
        self.joint = forward if isinstance(forward, JointPasses) else None
        self._calibration = calibration
        self._limits = limits
        self._choice = choice
        self._max_context = max_context
        self._rounds = RoundLengths()

    def open(self, prompt: Sequence[int], sampling: SamplingParams, cache_salt: str = "") -> SmallLmSequence:
        """Start a sequence; nothing is computed before the first draft."""
        temperature = sampling.temperature
        sigma = self._choice.sigma(temperature, self._calibration.sigma_at(temperature))
        coupling = Coupling(sampling, self.info.vocab_size, sigma, prompt, is_coupled=self._choice.is_coupled)
        beginning = PrefixKey(self.prefixes, cache_salt)
        max_children = self._choice.max_children
        context = DraftContext(prompt, self._max_context)
        parts = (self.info.kind, self._forward, coupling, self._limits, context, self._ahead, beginning)
        return SmallLmSequence(*parts, max_children=max_children, rounds=self._rounds)

    def open_sampled(self, prompt: Sequence[int], sampling: SamplingParams, cache_salt: str = "") -> SampledLmSequence:
        """Start a sequence whose trees are draws; nothing is computed before the first one."""
        coupling = Coupling(sampling, self.info.vocab_size, self._calibration.sigma_at(sampling.temperature), prompt)
        rates = self._calibration.acceptance_by_rank or UNMEASURED_ACCEPTANCE
        beginning = PrefixKey(self.prefixes, cache_salt)
        context = DraftContext(prompt, self._max_context)
        parts = (self._forward, coupling, sampling, self._limits, rates, self.info.kind, context, beginning)
        return SampledLmSequence(*parts)

    def warm_up(self) -> None:
        """Draft a few rounds, greedily and with noise, and read prompts of every size that there is code for."""
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
        # No target took part in these rounds.
        self._rounds = RoundLengths()


class SmallLmSequence(ReadContext):
    """One sequence: a cache whose trunk follows the committed tokens, and the tokens that it has not read yet.

    Rows that a draft has computed stay, with their children, as long as they may come behind the committed tokens. So
    do those that are computed ahead, behind likely outcomes of the tree that is being verified: where one of them
    comes true, the drafter's own next draft begins with them, too.
    """

    def __init__(
        self,
        source: str,
        forward: Forward[Any],
        coupling: Coupling,
        limits: TreeLimits,
        context: DraftContext,
        ahead: DraftAhead = NO_DRAFT_AHEAD,
        beginning: PrefixKey | None = None,
        max_children: int = COUPLED.max_children,
        rounds: RoundLengths | None = None,
    ) -> None:
        """`rounds` are those of all sequences, which share them."""
        self._source = source
        super().__init__(forward, context, coupling, beginning)
        self._max_unread = forward.max_unread
        self._max_children = max_children
        self._max_nodes = limits.max_nodes
        # Those of the last draft: budgets seldom change.
        self._limits = limits
        self._ahead = ahead
        self._pace = AheadPace(ahead.clock, rounds)
        self._outcomes: OutcomeSearch | None = None
        # Children of the last committed token, once it was read.
        self._root: Children | None = None

    def extend(self, token_ids: Sequence[int], features: bytes = b"") -> None:
        """Take in committed tokens; features are not needed."""
        if self._outcomes is not None:
            self._pace.outcome_came()
            self._outcomes = None
        super().extend(token_ids)

    def _start_over(self) -> None:
        super()._start_over()
        self._root = self._outcomes = None

    def draft(self, max_nodes: int, row_multiple: int = 1) -> TokenTree:
        """The best tree of at most `max_nodes` nodes behind the committed tokens; empty beyond the context."""
        if max_nodes < 1 or self._context.size > self._max_positions:
            return EMPTY_TREE
        self.read(max_pieces=sys.maxsize)
        self._outcomes = None
        budget = min(max_nodes, self._max_nodes)
        limits = self._limits
        if (limits.max_nodes, limits.row_multiple) != (budget, row_multiple):
            limits = self._limits = replace(limits, max_nodes=budget, row_multiple=row_multiple)
        tree = self._whole_search(limits)
        return self._search(limits, max_forwards=limits.max_steps) if tree is None else tree

    def prepare(self) -> bool:
        """Compute noise, read what no draft has read yet, or take one step ahead; whether there is more to do."""
        self._coupling.prepare(self._context.length, min(2 * (self._limits.max_steps + 1), MAX_PREPARED))
        if self._context.size > self._max_positions:
            return False
        if self.read(max_pieces=1):
            return True
        if self._context.unread or self._root is None:
            self._read()
        return self._outcomes is not None and not self._outcomes.is_over and self._outcomes.step()

    @property
    def drafts_ahead(self) -> bool:
        """Whether steps are taken ahead."""
        return self._ahead.max_steps > 0

    def expect(self, tree: TokenTree) -> None:
        """Draft behind likely outcomes of this tree from now on; not before the committed tokens were read."""
        context = self._context
        if not self.drafts_ahead or context.unread or self._root is None or context.size > self._max_positions:
            return
        # Rows that are padding are the draft's own to fill, once the outcome is known.
        limits = replace(self._limits, row_multiple=1, max_depth=self._deepest)
        self._outcomes = OutcomeSearch(tree, self, limits, self._ahead, self._pace)
        self._pace.expect()

    def ahead(self) -> tuple[AheadDraft, ...]:
        """The trees behind likely outcomes, once, when all are made."""
        return () if self._outcomes is None else self._outcomes.take()

    def find(self, parent_row: int, token_id: int) -> int | None:
        """The row of a node that was read; -1 is the end of the committed tokens."""
        return self._cache.find(parent_row, token_id)

    def children(self, row: int) -> Children:
        """What is expected behind a row."""
        return self._read() if row == ROOT else self._cache.children(row)

    def read_rows(self, rows: Sequence[Row]) -> None:
        """Read nodes in one forward pass."""
        depths = [row.depth for row in rows]
        logits = self._cache.grow([row.token_id for row in rows], [row.parent_row for row in rows], depths)
        positions = [self._context.length + depth for depth in depths]
        new = range(self._cache.num_rows - len(rows), self._cache.num_rows)
        paths = [self._cache.path(row) for row in new] if self._coupling.asks_for_paths else ()
        self._cache.note(self._coupling.children(logits, positions, self._max_children, paths))

    def tree(self, row: int, depth: int, limits: TreeLimits) -> TokenTree:
        """The best tree behind a row at this depth, of what has been read."""
        return known_tree(self, row, replace(limits, max_depth=limits.max_depth - depth), self._source)

    def _whole_search(self, limits: TreeLimits) -> TokenTree | None:
        """The best tree in one call, where the forward can; the same tree as `_search` finds."""
        # Noise is gathered for every step that there may be.
        if not self._coupling.is_noise_alone or limits.max_steps > MAX_PREPARED:
            return None
        self._follow()
        if not 0 < len(self._context.unread) <= self._max_unread:
            self._read()
        # A child of a node at depth d stands at position length + d; the last committed token is the root, at depth 0.
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
        # A node at depth d is read at position length + d - 1; its children need no reading.
        return self._max_positions - self._context.size + 1

    def _search(self, limits: TreeLimits, max_forwards: int) -> TokenTree:
        """The best tree within `limits`, from what the cache knows and at most `max_forwards` further passes."""
        rows: list[int] = []
        forwards_left = max_forwards

        def expand(frontier: Frontier) -> Sequence[Children]:
            nonlocal forwards_left
            parents = [ROOT if parent == ROOT else rows[parent] for parent in frontier.parent_rows]
            nodes = list(zip(parents, frontier.token_ids, strict=True))
            missing = [index for index, node in enumerate(nodes) if self._cache.find(*node) is None]
            if missing and forwards_left > 0:
                forwards_left -= 1
                self._grow(frontier, parents, missing)
            found = [self._cache.find(*node) for node in nodes]
            # What there was no pass left for has no children, so that nobody asks for its row.
            rows.extend(_NO_ROW if row is None else row for row in found)
            return [NO_CHILDREN if row is None else self._cache.children(row) for row in found]

        limits = replace(limits, max_steps=sys.maxsize, max_depth=min(limits.max_depth, self._deepest))
        return build_tree(self.children(ROOT), expand, limits, self._source)

    def _grow(self, frontier: Frontier, parents: Sequence[int], missing: Sequence[int]) -> None:
        """One forward pass over the frontier's missing nodes."""
        self.read_rows([Row(parents[at], frontier.token_ids[at], frontier.depths[at]) for at in missing])

    def _read(self) -> Children:
        """Bring the cache up to the last committed token; returns the children behind it."""
        self._follow()
        if self._context.unread:
            logits = self._cache.extend(self._context.unread)
            [self._root] = self._coupling.children(logits[None], [self._context.length], self._max_children)
            self._context.unread.clear()
        if self._root is None:
            raise RuntimeError("a sequence without tokens was asked for a draft")
        return self._root

    def _follow(self) -> None:
        """Take unread tokens that a search has read into the trunk; the root's children are known if that is all."""
        if self._context.unread:
            followed = self._cache.follow(self._context.unread)
            self._root = followed.children
            del self._context.unread[: followed.num_tokens]
