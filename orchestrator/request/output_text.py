"""Text and tokens of one output, collected into one delta while the client is slow."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from coppice.core.log_probs import TokenLogProbs
from coppice.core.sampling import StoppingOptions
from coppice.core.stop_strings import StopStringMatcher
from coppice.core.tokenizer import TargetTokenizer
from orchestrator.request.transcript import Transcript


@dataclass(frozen=True)
class OutputDelta:
    """New text and tokens since the last delta."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    # One per token, if requested.
    log_probs: tuple[TokenLogProbs, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.text or self.token_ids)


class Output:
    """Output of one request, after the part that an interrupted call has already delivered.

    Outcomes that arrive before the client reads are collected in one delta, so a slow client costs no more memory than
    its own output.
    """

    def __init__(
        self,
        tokenizer: TargetTokenizer,
        transcript: Transcript,
        stopping: StoppingOptions,
        want_text: bool,
        shown: Collection[str] = (),
    ) -> None:
        """`shown` are names of special tokens that are text."""
        self._tokenizer = tokenizer
        self._transcript = transcript
        self._decodes = want_text or bool(stopping.stop_strings)
        self._wants_text = want_text
        self._detokenizer = tokenizer.detokenizer(transcript.tokens[: transcript.num_prompt], shown)
        self._matcher = StopStringMatcher(stopping.stop_strings)
        self._min_tokens = stopping.min_tokens
        self._num_decoded = 0
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._log_probs: list[TokenLogProbs] = []
        self._undecoded: list[int] = []
        self._decode(transcript.tokens[transcript.num_prompt :])
        # The interrupted call delivered this text; the part held back by the matcher or detokenizer was not.
        self._text.clear()

    @property
    def stop_match(self) -> str | None:
        """Stop string that the text has reached, if any."""
        self._catch_up()
        return self._matcher.match

    def last_token_text(self) -> str:
        """Text of the last token, which is not in the output if it is a stop token."""
        return self._tokenizer.token_text(self._transcript.tokens[-1])

    def push(self, token_ids: Sequence[int], log_probs: Sequence[TokenLogProbs] = ()) -> None:
        """Add committed tokens. They are decoded on demand, off the next round's critical path."""
        self._token_ids.extend(token_ids)
        self._log_probs.extend(log_probs)
        self._undecoded.extend(token_ids)

    def finish(self) -> None:
        """Release text that was held back, unless a stop string ended the output."""
        self._catch_up()
        if not self._decodes:
            return
        may_end = self._num_decoded > self._min_tokens
        self._show(self._matcher.push(self._detokenizer.flush(), may_end=may_end))
        if self._matcher.match is None:
            self._show(self._matcher.flush())

    def take(self) -> OutputDelta:
        """Text and tokens since the last call."""
        self._catch_up()
        delta = OutputDelta("".join(self._text), tuple(self._token_ids), tuple(self._log_probs))
        self._text.clear()
        self._token_ids.clear()
        self._log_probs.clear()
        return delta

    def _catch_up(self) -> None:
        self._decode(self._undecoded)
        self._undecoded.clear()

    def _decode(self, token_ids: Sequence[int]) -> None:
        if not self._decodes:
            return
        # One by one: the text shown for a prefix must not depend on the grouping into rounds, or a resumed call would
        # lose or repeat some.
        for token in token_ids:
            if not self._transcript.is_stop(token):
                index = self._num_decoded
                self._show(self._matcher.push_token(token, index, self._min_tokens, self._detokenizer))
            self._num_decoded += 1

    def _show(self, text: str) -> None:
        if text and self._wants_text:
            self._text.append(text)
