"""The contract of a drafter kind. All of it but `info` and counts belongs to the model thread alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from coppice.core.denoising import Denoising
from coppice.core.sampling import SamplingParams
from coppice.core.tree import TokenTree
from drafter_svc.model.prefix_blocks import PrefixBlocks

if TYPE_CHECKING:
    # Not loaded before the service has set its niceness: NumPy starts threads.
    from drafter_svc.search.joint_passes import JointPasses


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    """What a drafter is and what it needs.

    `max_length` is the longest prompt, in tokens, that it takes; 0 for any. `acceptance_by_rank` is the calibrated
    probability that a child is right, by its rank among its siblings; empty when it was not measured. With
    `drafts_ahead` its sequences are to be told what is being verified.
    """

    kind: str
    model: str
    tokenizer_fingerprint: str
    vocab_size: int
    max_length: int
    feature_size: int = 0
    acceptance_by_rank: tuple[float, ...] = ()
    drafts_ahead: bool = False


@dataclass(frozen=True, slots=True)
class AheadDraft:
    """A tree behind an outcome that is not known yet: the tokens that it assumes committed, and how likely they are."""

    assumed: tuple[int, ...]
    log_prob: float
    tree: TokenTree


class DraftSequence(Protocol):
    """A drafter's state behind one sequence."""

    def extend(self, token_ids: Sequence[int], features: bytes) -> None:
        """Take in committed tokens (ids in the vocabulary), with the target's hidden states where it needs them."""
        ...

    def read(self, max_pieces: int) -> int:
        """Read from a long prompt what costs nothing, and at most `max_pieces` pieces that have to be computed.

        Returns how many pieces are left to be computed before a draft is a short piece of work. It may be asked for all
        the same, and reads them then.
        """
        ...

    def draft(self, max_nodes: int, row_multiple: int = 1) -> TokenTree:
        """The best tree of at most `max_nodes` nodes behind the committed tokens; empty beyond the context.

        The target computes the rows of root and nodes in multiples of `row_multiple`: what would be padding costs
        nothing as a node.
        """
        ...

    def prepare(self) -> bool:
        """A short piece of work that makes the next draft faster; called after a tree was sent, while nothing waits.

        Returns whether there is more to prepare.
        """
        ...


@runtime_checkable
class AheadSequence(DraftSequence, Protocol):
    """A sequence that drafts ahead, in `prepare`, once it knows what is being verified."""

    @property
    def drafts_ahead(self) -> bool:
        """Whether it does now: it may be switched off."""
        ...

    def expect(self, tree: TokenTree) -> None:
        """This tree is being verified behind the committed tokens."""
        ...

    def ahead(self) -> tuple[AheadDraft, ...]:
        """Trees behind likely outcomes of the expected tree, likeliest first: once, when all are made; else none."""
        ...


class Drafter(Protocol):
    """A loaded drafter."""

    info: DrafterInfo
    # What it keeps of prompts, for those that begin alike.
    prefixes: PrefixBlocks

    def open(self, prompt: Sequence[int], sampling: SamplingParams, cache_salt: str = "") -> DraftSequence:
        """Start a sequence behind a prompt of 1 to `info.max_length` token ids, or any number where that is 0.

        What it reads of the prompt is shared with sequences of the same salt alone.
        """
        ...

    def warm_up(self) -> None:
        """Run once whatever is slow the first time."""
        ...


@runtime_checkable
class JointDrafter(Drafter, Protocol):
    """A drafter that can make drafts of several sequences at a time."""

    # None where it makes them one after another.
    joint: JointPasses[Any] | None


@runtime_checkable
class DenoisingDrafter(Drafter, Protocol):
    """A drafter that fills blocks of masks, in as many passes as a request wants."""

    def open_denoising(
        self, prompt: Sequence[int], sampling: SamplingParams, denoising: Denoising, cache_salt: str = ""
    ) -> DraftSequence:
        """As `open`, with the numbers of steps and tokens that the request names, as far as the drafter lets it."""
        ...


@runtime_checkable
class SamplingDrafter(Drafter, Protocol):
    """A drafter that also draws sampled trees, for traversal verification."""

    def open_sampled(self, prompt: Sequence[int], sampling: SamplingParams, cache_salt: str = "") -> DraftSequence:
        """As `open`, with a temperature above 0, for drafts that carry the distributions that they were drawn from.

        What they are drawn with is a function of the seed and the committed length, and independent of the noise.
        """
        ...
