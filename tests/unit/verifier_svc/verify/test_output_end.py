"""Where an output ends by stop strings, token by token and resumed, and where the orchestrator cuts its text."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from coppice.core.sampling import StoppingOptions
from coppice.core.tokenizer import TargetTokenizer
from orchestrator.request.output_text import Output
from orchestrator.request.transcript import Transcript
from tests.toy_target import CONTEXT, TOKENIZER_JSON
from verifier_svc.verify.output_end import FinishReason, OutputEnd, SequenceFinish

TOKENIZER = TargetTokenizer(TOKENIZER_JSON)
PROMPT = list(b"ab")
# Bytes are tokens.
TEXTS = st.text(alphabet="ab€", min_size=1, max_size=16).map(str.encode)
STOPS = st.sampled_from([("ab",), ("a€", "b"), ("€",), ("abab", "ba")])


def ended(options: StoppingOptions, tokens: list[int], num_resumed: int = 0) -> tuple[int, SequenceFinish | None]:
    """How many tokens an output has that would go on, and how it ends."""
    end = OutputEnd(
        options,
        eos_token_ids=(),
        max_context_tokens=CONTEXT,
        tokenizer=TOKENIZER,
        prompt=PROMPT,
        resumed=tokens[:num_resumed],
    )
    for index, token in enumerate(tokens[num_resumed:], start=num_resumed + 1):
        if (finish := end.push(token)) is not None:
            return index, finish
    return len(tokens), None


def expected(text: bytes, options: StoppingOptions) -> tuple[int, str | None]:
    """The same by trying every length: text of n tokens is that of their whole characters."""
    exempt = len(text[: options.min_tokens].decode(errors="ignore"))
    for length in range(1, len(text) + 1):
        shown = text[:length].decode(errors="ignore")
        ends = [end for end in range(exempt + 1, len(shown) + 1) if shown[:end].endswith(options.stop_strings)]
        if ends:
            return length, max((s for s in options.stop_strings if shown[: ends[0]].endswith(s)), key=len)
    return len(text), None


@given(TEXTS, STOPS, st.integers(0, 12), st.integers(0, 30))
@example(b"abab", ("ab",), 3, 3)
@example(b"abab", ("ab",), 2, 2)
def test_the_first_stop_string_counts_that_ends_behind_min_tokens(
    text: bytes, stops: tuple[str, ...], min_tokens: int, num_resumed: int
) -> None:
    options = StoppingOptions(min_tokens=min_tokens, stop_strings=stops)
    length, match = expected(text, options)
    # Nobody resumes an output that has ended.
    length_got, finish = ended(options, list(text), min(num_resumed, length - 1))
    assert length_got == length
    assert finish == (None if match is None else SequenceFinish(FinishReason.STOP, match))


@given(TEXTS, STOPS, st.integers(0, 12))
def test_the_orchestrator_cuts_the_text_where_the_verifier_ends_it(
    text: bytes, stops: tuple[str, ...], min_tokens: int
) -> None:
    options = StoppingOptions(min_tokens=min_tokens, stop_strings=stops)
    length, finish = ended(options, list(text))
    transcript = Transcript(PROMPT, [], None, CONTEXT, (), ())
    output = Output(TOKENIZER, transcript, options, want_text=True)
    output.push(list(text[: length - 1]))
    assert output.stop_match is None
    output.push(list(text[length - 1 : length]))
    output.finish()
    whole = text[:length].decode(errors="replace")
    assert output.stop_match == (None if finish is None else finish.stop_match)
    if finish is None:
        assert output.take().text == whole
    else:
        shown = output.take().text
        assert whole.startswith(shown + str(finish.stop_match))
