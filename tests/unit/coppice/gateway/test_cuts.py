"""A round may bring several tokens: however an output is cut into rounds, its chunks join to the same answer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coppice.core.log_probs import TokenLogProbs
from coppice.core.sampling import StoppingOptions
from coppice.core.tokenizer import TargetTokenizer
from coppice.gateway.choices import ChatChoice, CompletionChoice, Wanted
from coppice.v1 import inference_pb2, sampling_pb2
from coppice.wire.convert import log_probs_to_proto
from orchestrator.request.output_text import Output, OutputDelta
from orchestrator.request.transcript import Transcript
from tests.toy_target import EOS, TOKENIZER_JSON

TOKENIZER = TargetTokenizer(TOKENIZER_JSON)
WANTED = Wanted(log_probs=True, token_ids=True)
Blocks = Sequence[Sequence[int]]


def messages(
    blocks: Blocks, stops: tuple[str, ...], max_tokens: int | None
) -> Iterator[inference_pb2.GenerateResponse]:
    """What the orchestrator sends of an output that comes in these blocks of tokens."""
    transcript = Transcript((97,), (), max_tokens, 10_000, (), (EOS,))
    output = Output(TOKENIZER, transcript, StoppingOptions(max_tokens, stop_strings=stops), want_text=True)
    position = 0
    for block in blocks:
        kept: list[int] = []
        for token in block:
            kept.append(token)
            transcript.append([token])
            if transcript.end() is not None:
                break
        # Until the text of a token completes a stop string, which ends the block there.
        for count in range(1, len(kept) + 1):
            output.push(kept[count - 1 : count], [TokenLogProbs(-position / 8, (7, 8), (-1.0, -2.0))])
            position += 1
            if output.stop_match is not None or (count == len(kept) and transcript.end() is not None):
                is_stop = output.stop_match is not None
                output.finish()
                last = message(output.take())
                last.finished.reason = sampling_pb2.FINISH_REASON_STOP if is_stop else transcript.end()
                if is_stop:
                    last.finished.stop_match = output.stop_match
                last.usage.completion_tokens = position
                yield last
                return
        yield message(output.take())
    raise AssertionError("the output has no end")


def message(delta: OutputDelta) -> inference_pb2.GenerateResponse:
    sent = inference_pb2.GenerateResponse(
        text=delta.text, token_ids=delta.token_ids, log_probs=log_probs_to_proto(delta.log_probs)
    )
    for token, one in zip(delta.token_ids, sent.log_probs, strict=True):
        one.token = TOKENIZER.token_bytes(token)
        one.top_tokens.extend(map(TOKENIZER.token_bytes, one.top_token_ids))
    return sent


def joined_chat(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The answer that a client puts together from the chunks of a conversation."""
    return {
        "index": 0,
        "message": {
            "role": "".join(chunk["delta"].get("role", "") for chunk in chunks),
            "content": "".join(chunk["delta"].get("content", "") for chunk in chunks),
            "refusal": None,
        },
        "logprobs": {"content": [one for chunk in chunks for one in (chunk["logprobs"] or {"content": []})["content"]]},
        **ends(chunks),
    }


def joined_completion(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    log_probs: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for chunk in chunks:
        for name, values in (chunk["logprobs"] or {}).items():
            log_probs[name] += values
    return {"index": 0, "text": "".join(chunk["text"] for chunk in chunks), "logprobs": log_probs, **ends(chunks)}


def ends(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    assert [chunk["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    last = {name: chunks[-1][name] for name in ("finish_reason", "stop_reason", "coppice")}
    return {**last, "token_ids": [token for chunk in chunks for token in chunk["token_ids"]]}


KINDS: list[tuple[type[ChatChoice] | type[CompletionChoice], Any]] = [
    (ChatChoice, joined_chat),
    (CompletionChoice, joined_completion),
]


def answers(blocks: Blocks, stops: tuple[str, ...], max_tokens: int | None = None) -> list[dict[str, Any]]:
    """The answers of both APIs, after a look at what their chunks join to."""
    found = []
    for kind, join in KINDS:
        choice = kind(0, WANTED)
        chunks = [chunk for one in messages(blocks, stops, max_tokens) if (chunk := choice.add(one)) is not None]
        whole = choice.whole()
        assert join(chunks) == whole
        found.append(whole)
    return found


def every_cut(tokens: Sequence[int]) -> Iterator[Blocks]:
    """Every way to cut tokens into blocks."""
    for cuts in itertools.product((False, True), repeat=len(tokens) - 1):
        ends_at = [place + 1 for place, cut in enumerate(cuts) if cut]
        yield [tokens[a:b] for a, b in itertools.pairwise([0, *ends_at, len(tokens)])]


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("a</s>b", ("</s>",), "a"),
        ("né, €!", (), "né, €!"),
        ("x\U0001f333y", (), "x\U0001f333y"),
        ("ab\n\n\ncd", ("\n\n", "cd"), "ab"),
        ("</</s>é", ("</s>",), "</"),
        ("é€", ("€",), "é"),
        # Half a stop string at the end is text.
        ("ab</s", ("</s>",), "ab</s"),
    ],
)
def test_every_cut_of_an_output_gives_the_same_answer(text: str, stops: tuple[str, ...], expected: str) -> None:
    tokens = [*text.encode(), EOS]
    one_at_a_time = answers([[token] for token in tokens], stops)
    assert one_at_a_time[0]["message"]["content"] == one_at_a_time[1]["text"] == expected
    for blocks in every_cut(tokens):
        assert answers(blocks, stops) == one_at_a_time


@given(
    text=st.text(st.sampled_from("abé€\U0001f333<>/"), max_size=40),
    stops=st.lists(st.text(st.sampled_from("abé€<>/"), min_size=1, max_size=3), max_size=2).map(tuple),
    max_tokens=st.none() | st.integers(1, 60),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6),
)
def test_long_outputs_do_not_depend_on_their_rounds(
    text: str, stops: tuple[str, ...], max_tokens: int | None, sizes: list[int]
) -> None:
    tokens, blocks = [*text.encode(), EOS], []
    for size in itertools.cycle(sizes):
        blocks.append(tokens[:size])
        tokens = tokens[size:]
        if not tokens:
            break
    alone = [[token] for block in blocks for token in block]
    assert answers(blocks, stops, max_tokens) == answers(alone, stops, max_tokens)
