"""Text from tokens: deltas, stop strings, characters spread over tokens, and resumed outputs."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coppice.core.sampling import StoppingOptions
from coppice.core.tokenizer import TargetTokenizer
from coppice.v1 import sampling_pb2
from orchestrator.request.output_text import Output
from orchestrator.request.transcript import Transcript
from tests.toy_target import CONTEXT, EOS, TOKENIZER_JSON, toy_log_probs

TOKENIZER = TargetTokenizer(TOKENIZER_JSON)
PROMPT = list(b"say: ")


def transcript_of(resumed: list[int], max_tokens: int | None = None, stops: tuple[int, ...] = ()) -> Transcript:
    return Transcript(PROMPT, resumed, max_tokens, CONTEXT, stops, (EOS,))


def run(text: bytes, cuts: list[int], stop: tuple[str, ...], resumed: int = 0, min_tokens: int = 0) -> str:
    """The text of an output that arrives in pieces, the first `resumed` bytes of it in an interrupted call."""
    ids = list(text)
    transcript = transcript_of(ids[:resumed])
    output = Output(TOKENIZER, transcript, StoppingOptions(min_tokens=min_tokens, stop_strings=stop), want_text=True)
    shown = ""
    rest = ids[resumed:]
    edges = [0, *sorted(cut for cut in cuts if cut < len(rest)), len(rest)]
    for start, end in itertools.pairwise(edges):
        transcript.append(rest[start:end])
        output.push(rest[start:end])
        shown += output.take().text
    output.finish()
    return shown + output.take().text


TEXTS = st.text(alphabet="ab €😀é", max_size=12).map(str.encode)


@given(TEXTS, st.lists(st.integers(0, 30), max_size=6))
def test_joined_deltas_are_the_text_however_rounds_cut_it(text: bytes, cuts: list[int]) -> None:
    assert run(text, cuts, ()) == text.decode()


@given(TEXTS, st.lists(st.integers(0, 30), max_size=6), st.sampled_from(["b", "ab", " €", "😀"]))
def test_text_ends_before_the_stop_string(text: bytes, cuts: list[int], stop: str) -> None:
    assert run(text, cuts, (stop,)) == text.decode().partition(stop)[0]


@given(TEXTS, st.integers(0, 40), st.sampled_from([(), ("zz",), (" €",), ("ab", "€b")]))
def test_an_interrupted_output_goes_on_without_lost_or_repeated_text(
    text: bytes, resumed: int, stop: tuple[str, ...]
) -> None:
    resumed = min(resumed, len(text))
    first = Output(TOKENIZER, transcript_of([]), StoppingOptions(stop_strings=stop), want_text=True)
    first.push(list(text[:resumed]))
    assert first.take().text + run(text, [], stop, resumed) == run(text, [], stop)


@given(TEXTS, st.integers(0, 40), st.integers(0, 12), st.sampled_from([("b",), (" €",), ("ab", "€b"), ("😀a",)]))
def test_a_stop_string_within_the_first_min_tokens_is_text_like_any_other(
    text: bytes, resumed: int, min_tokens: int, stop: tuple[str, ...]
) -> None:
    resumed = min(resumed, len(text))
    # A token is a byte here, and the text of the first ones is that of their whole characters.
    exempt = len(text[:min_tokens].decode(errors="ignore"))
    whole = text.decode()
    ends = [end for end in range(exempt + 1, len(whole) + 1) if whole[:end].endswith(stop)]
    expected = whole
    if ends:
        expected = whole[: ends[0] - max(len(one) for one in stop if whole[: ends[0]].endswith(one))]
    assert run(text, [3, 7], stop, min_tokens=min_tokens) == expected
    first = Output(TOKENIZER, transcript_of([]), StoppingOptions(min_tokens=min_tokens, stop_strings=stop), True)
    first.push(list(text[:resumed]))
    assert first.take().text + run(text, [], stop, resumed, min_tokens) == expected


def test_deltas_pile_up_into_one_while_nobody_takes_them() -> None:
    output = Output(TOKENIZER, transcript_of([]), StoppingOptions(), want_text=True)
    for byte in b"hello":
        output.push([byte])
    delta = output.take()
    assert (delta.text, delta.token_ids) == ("hello", tuple(b"hello"))
    assert not output.take()


def test_log_probabilities_stay_in_step_with_the_token_ids_while_their_text_is_held_back() -> None:
    said = list(b"ab STOP")
    expected = [toy_log_probs(at, token, 1) for at, token in enumerate(said)]
    transcript = transcript_of([])
    output = Output(TOKENIZER, transcript, StoppingOptions(stop_strings=("STOP",)), want_text=True)
    text = ""
    for at, token in enumerate(said):
        transcript.append([token])
        output.push([token], [expected[at]])
        delta = output.take()
        text += delta.text
        assert (delta.token_ids, delta.log_probs) == ((token,), (expected[at],))
    output.finish()
    assert text + output.take().text == "ab "


def test_a_stop_token_is_in_the_token_ids_but_not_in_the_text() -> None:
    transcript = transcript_of([], stops=(ord("!"),))
    output = Output(TOKENIZER, transcript, StoppingOptions(), want_text=True)
    output.push(list(b"hi!"))
    output.finish()
    delta = output.take()
    assert (delta.text, delta.token_ids) == ("hi", tuple(b"hi!"))


@pytest.mark.parametrize(
    ("text", "max_tokens", "reason"),
    [
        ([EOS], None, sampling_pb2.FINISH_REASON_EOS),
        ([7], None, sampling_pb2.FINISH_REASON_STOP),
        ([1, 2, 3], 3, sampling_pb2.FINISH_REASON_LENGTH),
        ([1] * (CONTEXT - len(PROMPT)), None, sampling_pb2.FINISH_REASON_CONTEXT_LENGTH),
        ([1, 2], 3, None),
        ([], 3, None),
    ],
)
def test_a_transcript_knows_when_its_tokens_have_ended(
    text: list[int], max_tokens: int | None, reason: sampling_pb2.FinishReason | None
) -> None:
    assert transcript_of(text, max_tokens, stops=(7,)).end() == reason
