"""Interface of drafter kinds. All but `info` and counts is for the model thread only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from coppice.core.denoising import Denoising
from coppice.core.sampling import SamplingParams
from coppice.core.tree import TokenTree
from drafter_svc.model.prefix_blocks import PrefixBlocks

if TYPE_CHECKING:
    # Not loaded before niceness is set: NumPy starts threads.
    from drafter_svc.search.joint_passes import JointPasses


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    """Properties and requirements of a drafter.

    `max_length` is the longest prompt in tokens; 0: any. `acceptance_by_rank` is the calibrated probability that a
    child is right, by rank among its siblings; empty if not measured. With `drafts_ahead` it wants to know the tree
    under verification. Features have `feature_size` numbers, of the states of `feature_layers`; of a prompt's
    tokens the last `max_prompt_features` are read. `target_weights` is the
    weights fingerprint of the target that it was made for; empty if unknown.
    """

    kind: str
    model: str
    tokenizer_fingerprint: str
    vocab_size: int
    max_length: int
    feature_size: int = 0
    feature_layers: tuple[int, ...] = ()
    max_prompt_features: int = 0
    target_weights: str = ""
    acceptance_by_rank: tuple[float, ...] = ()
    drafts_ahead: bool = False


@dataclass(frozen=True, slots=True)
class AheadDraft:
    """A tree after an outcome that is not known yet: assumed tokens and their path log-probability."""

    assumed: tuple[int, ...]
    log_prob: float
    tree: TokenTree


class DraftSequence(Protocol):
    """A drafter's state of one sequence."""

    def extend(self, token_ids: Sequence[int], features: bytes) -> None:
        """Add committed tokens (ids in the vocabulary), with the target's hidden states if needed."""

    def read(self, max_pieces: int) -> int:
        """Read cached pieces of a long prompt, and compute at most `max_pieces` others.

        Returns the pieces left to compute before a draft is a short job; a draft may still be requested, and reads
        them.
        """

    def draft(self, max_nodes: int, row_multiple: int = 1) -> TokenTree:
        """Best tree of at most `max_nodes` nodes after the committed tokens; empty beyond the context.

        The target pads rows (root and nodes) to multiples of `row_multiple`, so nodes in place of padding are free.
        """

    def prepare(self) -> bool:
        """Do a short job that speeds up the next draft; called after a tree was sent, while the thread is idle.

        Returns whether there is more to prepare.
        """


@runtime_checkable
class AheadSequence(DraftSequence, Protocol):
    """A sequence that drafts ahead, in `prepare`, given the tree under verification."""

    @property
    def drafts_ahead(self) -> bool:
        """Whether drafting ahead is on."""

    def expect(self, tree: TokenTree) -> None:
        """Report the tree under verification after the committed tokens."""

    def ahead(self) -> tuple[AheadDraft, ...]:
        """Trees after likely outcomes of the expected tree, likeliest first: once, when all are ready; else empty."""


@runtime_checkable
class PromptReader(DraftSequence, Protocol):
    """A sequence that reads features of its prompt."""

    def see_prompt(self, first_token: int, features: bytes) -> None:
        """Add features of the prompt's tokens from number `first_token` on; what is damaged is ignored."""


class Drafter(Protocol):
    """A loaded drafter."""

    info: DrafterInfo
    # Cached prompt prefixes.
    prefixes: PrefixBlocks

    def open(self, prompt: Sequence[int], sampling: SamplingParams, cache_salt: str = "") -> DraftSequence:
        """Open a sequence with a prompt of 1 to `info.max_length` token ids (any number if that is 0).

        Cached prefixes are only shared with sequences of the same salt.
        """

    def warm_up(self) -> None:
        """Run all code paths that are slow on first use."""


@runtime_checkable
class JointDrafter(Drafter, Protocol):
    """A drafter that can draft for several sequences in joint passes."""

    # None if drafts are made one after another.
    joint: JointPasses[Any] | None


@runtime_checkable
class DenoisingDrafter(Drafter, Protocol):
    """A drafter that denoises blocks of masks in a requested number of passes."""

    def open_denoising(
        self, prompt: Sequence[int], sampling: SamplingParams, denoising: Denoising, cache_salt: str = ""
    ) -> DraftSequence:
        """Like `open`, with the requested steps and block size, within the drafter's limits."""


@runtime_checkable
class SamplingDrafter(Drafter, Protocol):
    """A drafter that can also sample trees, for traversal verification."""

    def open_sampled(self, prompt: Sequence[int], sampling: SamplingParams, cache_salt: str = "") -> DraftSequence:
        """Like `open`, at a temperature above 0, for drafts with the distributions they were drawn from.

        Draws are a function of the seed and the committed length, independent of the noise.
        """
