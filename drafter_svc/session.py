"""One sequence's state in the service, and the events that change it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import grpc

from coppice.core.denoising import LEFT_TO_DRAFTER, Denoising
from coppice.core.errors import CoppiceError, InvalidRequestError
from coppice.core.sampling import SamplingParams, check_token_ids
from coppice.core.tree import TokenTree
from coppice.obs.logs import check_request_id
from drafter_svc.acceptance_map import AcceptanceMap, SentTree
from drafter_svc.drafters.base import (
    AheadDraft,
    AheadSequence,
    DenoisingDrafter,
    Drafter,
    DrafterInfo,
    DraftSequence,
    SamplingDrafter,
)
from drafter_svc.model.cache_budget import CacheBudget


class UnknownSequenceError(CoppiceError):
    """A message for a sequence that was never opened, or has ended."""

    status = grpc.StatusCode.NOT_FOUND


class DuplicateSequenceError(CoppiceError):
    """A sequence is opened that is open already."""

    status = grpc.StatusCode.ALREADY_EXISTS


@dataclass(frozen=True, slots=True)
class SessionOpening:
    """How a sequence starts: its prompt, its sampling, and the most nodes of a tree (0 asks for none).

    Rows of the target's pass are computed in multiples of `row_multiple`.
    With `is_sampled` its trees have to be sampled; the drafter is then a `SamplingDrafter`.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_nodes: int
    row_multiple: int = 1
    is_sampled: bool = False
    # Of the request, for logs.
    request_id: str = ""
    # What is read of the prompt is shared with sequences of the same salt alone.
    cache_salt: str = ""
    # Nothing is drafted ahead.
    is_synchronous: bool = False
    # How blocks of masks are filled, by drafters that denoise them.
    denoising: Denoising = LEFT_TO_DRAFTER

    def check(self, info: DrafterInfo) -> None:
        """Raise InvalidRequestError, which names the field, unless the drafter can take this."""
        check_request_id(self.request_id)
        if not self.prompt:
            raise InvalidRequestError("open.prompt_token_ids", "must not be empty")
        if 0 < info.max_length < len(self.prompt):
            raise InvalidRequestError(
                "open.prompt_token_ids", f"{len(self.prompt)} tokens, more than the context of {info.max_length}"
            )
        check_token_ids("open.prompt_token_ids", self.prompt, info.vocab_size)
        for name, token_ids in self.sampling.named_token_ids().items():
            check_token_ids(f"open.{name}", token_ids, info.vocab_size)


@dataclass(frozen=True, slots=True)
class SessionOutcome:
    """Tokens committed by a round. `max_nodes` and `row_multiple` replace the opening's from now on, unless None."""

    base_length: int
    token_ids: tuple[int, ...]
    features: bytes
    max_nodes: int | None
    row_multiple: int | None = None


@dataclass(frozen=True, slots=True)
class SessionDraft:
    """A tree behind the first `base_length` committed tokens."""

    base_length: int
    tree: TokenTree


@dataclass(frozen=True, slots=True)
class AheadDrafts:
    """Trees behind likely outcomes of the round that starts at `base_length`, the likeliest outcome first."""

    base_length: int
    drafts: tuple[AheadDraft, ...]

    @property
    def num_nodes(self) -> int:
        """Nodes of all trees."""
        return sum(len(draft.tree) for draft in self.drafts)


class Session:
    """One sequence. The event loop posts outcomes; the model thread takes them in and drafts."""

    def __init__(
        self, drafter: Drafter, opening: SessionOpening, acceptance: AcceptanceMap, caches: CacheBudget | None = None
    ) -> None:
        """`acceptance` calibrates what is sent, and learns from what becomes of it; `caches` bounds what is kept."""
        self._drafter = drafter
        self._caches = caches or CacheBudget()
        self._acceptance = acceptance
        # The last tree, until another is sent.
        self._sent: SentTree | None = None
        self.request_id = opening.request_id
        self._opening = opening
        self._sequence: DraftSequence | None = None
        self._length = len(opening.prompt)
        self._max_nodes = opening.max_nodes
        self._row_multiple = opening.row_multiple
        self._inbox: deque[SessionOutcome] = deque()
        self._scheduled = False
        # Whether something was taken in that no draft has followed.
        self._has_news = False
        # Set when the sequence has ended or failed; the model thread then leaves it alone.
        self.closed = False
        # Whether idle work is queued. The model thread's own.
        self.preparing = False

    def post(self, outcome: SessionOutcome) -> None:
        """Leave an outcome for the model thread."""
        self._inbox.append(outcome)

    def schedule(self) -> bool:
        """Whether a job must be submitted; False while one that will see all posted outcomes is waiting."""
        if self._scheduled:
            return False
        self._scheduled = True
        return True

    def read(self, max_pieces: int) -> int:
        """Take in everything posted and read at most `max_pieces` pieces of it. On the model thread.

        Returns how many pieces are left to be read before `advance` is a short piece of work; 0 when the budget asks
        for no tree.

        Raises:
            InvalidRequestError: an outcome does not fit the sequence, which is then beyond use.
        """
        sequence = self._take_in()
        if not self._max_nodes:
            return 0
        if num_left := sequence.read(max_pieces):
            # Else a draft follows, which counts it.
            self._caches.note(sequence)
        return num_left

    def advance(self) -> SessionDraft | None:
        """Take in everything posted and draft once, for the newest state. On the model thread.

        None when the budget asks for no tree or there is nothing new.

        Raises:
            InvalidRequestError: an outcome does not fit the sequence, which is then beyond use.
        """
        # Cleared before the inbox is read: whatever is posted later finds a new job.
        self._scheduled = False
        sequence = self._take_in()
        has_news, self._has_news = self._has_news, False
        if not has_news or self._max_nodes == 0:
            return None
        tree = sequence.draft(self._max_nodes, self._row_multiple)
        self._caches.note(sequence)
        return self._calibrated(tree)

    def expect(self, base_length: int, tree: TokenTree) -> bool:
        """Draft ahead behind this tree's outcomes; whether it will. On the model thread.

        Not where more was committed meanwhile, nor where nothing is to be drafted ahead: an expectation is a hint.
        """
        sequence = self._sequence
        if self.closed or self._inbox or base_length != self._length or not isinstance(sequence, AheadSequence):
            return False
        if self._opening.is_synchronous or not sequence.drafts_ahead:
            return False
        sequence.expect(tree)
        return True

    def ahead(self) -> AheadDrafts | None:
        """Trees behind likely outcomes, when they are made. On the model thread."""
        if self.closed or self._inbox or not isinstance(self._sequence, AheadSequence):
            return None
        drafts = self._sequence.ahead()
        return AheadDrafts(self._length, drafts) if drafts else None

    def prepare(self) -> bool:
        """Do a piece of work for the next outcome; whether there is more. On the model thread, while nothing waits.

        There is none while the budget asks for no tree, nor for a sequence that was made to forget, until it drafts
        again: idle sequences must not take each other's room by turns.
        """
        sequence = self._sequence
        if self.closed or sequence is None or not self._max_nodes or self._caches.has_forgotten(sequence):
            return False
        has_more = sequence.prepare()
        self._caches.note(sequence)
        return has_more

    def _calibrated(self, tree: TokenTree) -> SessionDraft:
        """The draft to send. Sampled trees go as they are: what they hold decides what is committed."""
        if self._opening.is_sampled:
            return SessionDraft(self._length, tree)
        self._sent = self._acceptance.calibrated(tree, self._opening.sampling.temperature)
        return SessionDraft(self._length, self._sent.tree)

    def _take_in(self) -> DraftSequence:
        if self._sequence is None:
            self._sequence = self._open()
            self._has_news = True
        while self._inbox:
            self._apply(self._sequence, self._inbox.popleft())
            self._has_news = True
        return self._sequence

    def _open(self) -> DraftSequence:
        opening = self._opening
        if not opening.is_sampled:
            if opening.denoising != LEFT_TO_DRAFTER and isinstance(self._drafter, DenoisingDrafter):
                return self._drafter.open_denoising(
                    opening.prompt, opening.sampling, opening.denoising, opening.cache_salt
                )
            return self._drafter.open(opening.prompt, opening.sampling, opening.cache_salt)
        assert isinstance(self._drafter, SamplingDrafter), "checked before the session was made"
        return self._drafter.open_sampled(opening.prompt, opening.sampling, opening.cache_salt)

    def _apply(self, sequence: DraftSequence, outcome: SessionOutcome) -> None:
        if outcome.base_length != self._length:
            raise InvalidRequestError(
                "outcome.base_length", f"is {outcome.base_length}, but {self._length} tokens are committed"
            )
        check_token_ids("outcome.token_ids", outcome.token_ids, self._drafter.info.vocab_size)
        if self._sent is not None:
            self._sent.follow(outcome.token_ids)
        sequence.extend(outcome.token_ids, outcome.features)
        self._length += len(outcome.token_ids)
        if outcome.max_nodes is not None:
            self._max_nodes = outcome.max_nodes
        if outcome.row_multiple is not None:
            self._row_multiple = outcome.row_multiple
