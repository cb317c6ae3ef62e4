"""A round may bring several tokens: however an output is cut into rounds, its chunks join to the same answer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coppice.core.chat import CallFormat
from coppice.core.log_probs import TokenLogProbs
from coppice.core.sampling import StoppingOptions
from coppice.core.tokenizer import TargetTokenizer
from coppice.gateway.choices import ChatChoice, CompletionChoice, Wanted
from coppice.gateway.generation import _call_format
from coppice.gateway.reasoning import ReasonedAnswer
from coppice.gateway.tool_calls import (
    AnswerParser,
    CallDelta,
    ForcedCall,
    LlamaCalls,
    MistralCalls,
    PlainText,
    ReasoningDelta,
    RequiredCall,
    TaggedCalls,
)
from coppice.v1 import inference_pb2, sampling_pb2
from coppice.wire.convert import log_probs_to_proto
from orchestrator.request.output_text import Output, OutputDelta
from orchestrator.request.transcript import Transcript
from tests.toy_target import EOS, TOKENIZER_JSON

TOKENIZER = TargetTokenizer(TOKENIZER_JSON)
WANTED = Wanted(log_probs=True, token_ids=True)
Blocks = Sequence[Sequence[int]]
NewParser = Callable[[], AnswerParser]


def cut_in_turn(text: str, sizes: Sequence[int]) -> list[str]:
    """A text cut into pieces of these sizes, in turn."""
    cut, at = [], 0
    for size in itertools.cycle(sizes):
        cut.append(text[at : at + size])
        at += size
        if at >= len(text):
            break
    return cut


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
    content = "".join(chunk["delta"].get("content", "") for chunk in chunks)
    calls: list[dict[str, Any]] = []
    for part in [part for chunk in chunks for part in chunk["delta"].get("tool_calls", ())]:
        if part["index"] == len(calls):
            calls.append({"id": part["id"], "type": part["type"], "function": dict(part["function"])})
        else:
            assert part["index"] == len(calls) - 1
            calls[-1]["function"]["arguments"] += part["function"]["arguments"]
    said: dict[str, Any] = {"role": "".join(chunk["delta"].get("role", "") for chunk in chunks), "refusal": None}
    if reasoning := "".join(chunk["delta"].get("reasoning_content", "") for chunk in chunks):
        said["reasoning_content"] = reasoning
    return {
        "index": 0,
        "message": said | ({"content": content or None, "tool_calls": calls} if calls else {"content": content}),
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


def answers(
    blocks: Blocks, stops: tuple[str, ...], max_tokens: int | None = None, new_parser: NewParser = PlainText
) -> list[dict[str, Any]]:
    """The answers of both APIs, after a look at what their chunks join to."""
    choices: list[tuple[ChatChoice | CompletionChoice, Any]] = [
        (ChatChoice(0, WANTED, new_parser()), joined_chat),
        (CompletionChoice(0, WANTED), joined_completion),
    ]
    found = []
    for choice, join in choices:
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


def pieces(cut: Sequence[str], parser: AnswerParser) -> tuple[str, list[tuple[str, str, str]]]:
    """Content and calls (id, name, arguments) of a text that comes in these pieces."""
    content, calls = "", list[tuple[str, str, str]]()
    for index, text in enumerate(cut):
        for piece in parser.push(text, index == len(cut) - 1):
            assert not isinstance(piece, ReasoningDelta)
            if isinstance(piece, str):
                assert piece
                content += piece
            elif piece.index == len(calls):
                assert piece.id is not None
                assert piece.name is not None
                calls.append((piece.id, piece.name, piece.arguments))
            else:
                assert piece == CallDelta(len(calls) - 1, piece.arguments)
                calls[-1] = (*calls[-1][:2], calls[-1][2] + piece.arguments)
    return content, calls


def tagged() -> AnswerParser:
    return TaggedCalls(("f", "g"), "call")


F, G = '{"name": "f", "arguments": {"x": "é"}}', '{"name":"g","arguments":{}}'
CALL_F, CALL_G = ("f", '{"x": "é"}'), ("g", "{}")
TEXTS: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("no call", "no call", []),
    (f"<tool_call>\n{F}\n</tool_call>", "", [CALL_F]),
    (f"Let me see.\n\n<tool_call>{F}</tool_call>\n<tool_call>{G}</tool_call>\n", "Let me see.", [CALL_F, CALL_G]),
    (f"<tool_call>{G}</tool_call> and then\n", " and then\n", [CALL_G]),
    # The answer ends in place of the last tag.
    (f"<tool_call>{G}", "", [CALL_G]),
    ("  \n ", "  \n ", []),
    ('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [("f", '{"x": 1}')]),
    # None of these is a call of a known tool.
    *(
        (text, text, [])
        for text in (
            "a <tool_call>{x}</tool_call> b",
            '<tool_call>{"name": "h", "arguments": {}}</tool_call>',
            'x <tool_call>{"name": "f", "argu',
            "1 < 2 <tool> <tool_cal",
            # Half a surrogate pair, and a number that JSON does not have.
            r'<tool_call>{"name": "f", "arguments": {"x": "\ud800"}}</tool_call>',
            '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>',
        )
    ),
]  # fmt: skip


def mistral() -> AnswerParser:
    return MistralCalls(("f", "g"), "call")


MISTRAL_TEXTS: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("no call", "no call", []),
    (f"[TOOL_CALLS] [{F}, {G}]", "", [CALL_F, CALL_G]),
    (f"Let me see.\n[TOOL_CALLS][{F}]\n", "Let me see.", [CALL_F]),
    ('[TOOL_CALLS]f[ARGS]{"x": "é"}[TOOL_CALLS]g[ARGS]{}', "", [CALL_F, CALL_G]),
    ('ok [TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{"x": "é"}\n[TOOL_CALLS] g{} ', "ok", [CALL_F, CALL_G]),
    # A mark inside an argument is text.
    ('[TOOL_CALLS]f[ARGS]{"x": "[TOOL_CALLS]g"}', "", [("f", '{"x": "[TOOL_CALLS]g"}')]),
    (f"[TOOL_CALLS][{G}] and then\n", " and then\n", [CALL_G]),
    # The second is cut off.
    ("[TOOL_CALLS]g[ARGS]{}[TOOL_CALLS]f[ARGS]{", "[TOOL_CALLS]f[ARGS]{", [CALL_G]),
    *(
        (text, text, [])
        for text in (
            " \n ",
            "a [1] [TOOL_CAL",
            "a\n[TOOL_CALLS]",
            f"a [TOOL_CALLS] [{F}, ",
            f'[TOOL_CALLS][{F}, {{"name": "h", "arguments": {{}}}}]',
            "[TOOL_CALLS]h[ARGS]{}",
            "[TOOL_CALLS][]",
            "[TOOL_CALLS]{x}",
            '[TOOL_CALLS]f[ARGS]{"x": NaN}',
        )
    ),
]


def llama() -> AnswerParser:
    return LlamaCalls(("f", "g"), "call")


LLAMA_F, LLAMA_G = '{"name": "f", "parameters": {"x": "é"}}', '{"type": "function", "name": "g", "parameters": {}}'
LLAMA_TEXTS: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("no call", "no call", []),
    (LLAMA_F, "", [CALL_F]),
    (f"\n<|python_tag|>{LLAMA_F}; {LLAMA_G}\n", "", [CALL_F, CALL_G]),
    (f"{LLAMA_G}\n{LLAMA_F};", "", [CALL_G, CALL_F]),
    (G, "", [CALL_G]),
    *(
        (text, text, [])
        for text in (
            "  \n",
            f"Let me see. {LLAMA_F}",
            f"{LLAMA_F} and then",
            "<|python_ta",
            "<|python_tag|>",
            "<|python_tag|>print(1)",
            "<| a",
            '{"x": 1}',
            '{"name": "f"}',
            '{"name": "h", "parameters": {}}',
            f'{LLAMA_F}; {{"name": "f", "para',
            "{x}",
        )
    ),
]


FORMATS = [(tagged, TEXTS), (mistral, MISTRAL_TEXTS), (llama, LLAMA_TEXTS)]


@pytest.mark.parametrize(
    ("parser", "text", "content", "calls"), [(parser, *one) for parser, texts in FORMATS for one in texts]
)
def test_calls_are_found_however_their_text_is_cut(
    parser: NewParser, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    expected = (content, [(f"call{index}", *call) for index, call in enumerate(calls)])
    assert pieces([text], parser()) == expected
    assert pieces([*text, ""], parser()) == expected
    # Every way to cut it in three.
    for a, b in itertools.combinations_with_replacement(range(len(text) + 1), 2):
        assert pieces([text[:a], text[a:b], text[b:]], parser()) == expected


def test_ids_of_mistral_calls_have_nine_characters() -> None:
    text = "[TOOL_CALLS]g[ARGS]{}" * 11
    ids = [one[0] for one in pieces([text], MistralCalls(("g",), "abcdefgh"))[1]]
    assert (ids[0], ids[10]) == ("abcdefgh0", "abcdefg10")
    assert len(set(ids)) == 11


MARKS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"]


@pytest.mark.parametrize("parser", [parser for parser, _ in FORMATS])
@given(
    parts=st.lists(
        st.sampled_from(
            [f"<tool_call>{F}</tool_call>", f"[{F}]", LLAMA_F, F, G, "g", " ", "\n", "text", "<", "[", ";", "é", *MARKS]
        ),
        max_size=8,
    ),
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=6),
)
def test_any_text_gives_the_same_in_every_cut(parser: NewParser, parts: list[str], sizes: list[int]) -> None:
    text = "".join(parts)
    cut = cut_in_turn(text, sizes)
    assert pieces(cut, parser()) == pieces([*text, ""], parser())


def test_what_a_grammar_makes_a_call_is_one_in_every_cut() -> None:
    forced, required = '{"x": "é"}', '{"name": "f", "arguments": {"x": "é"}}'
    for a, b in itertools.combinations_with_replacement(range(len(required) + 1), 2):
        assert pieces([forced[:a], forced[a:b], forced[b:]], ForcedCall("f", "c")) == ("", [("c0", "f", forced)])
        cut = [required[:a], required[a:b], required[b:]]
        assert pieces(cut, RequiredCall(("f",), "c")) == ("", [("c0", "f", '{"x": "é"}')])
    # Cut off by max_tokens.
    assert pieces([required[:9], required[9:20]], RequiredCall(("f",), "c")) == (required[:20], [])


@pytest.mark.parametrize(
    ("parser", "text", "content"),
    [
        (tagged, f"ok\n<tool_call>{G}</tool_call>", "ok"),
        (mistral, "ok\n[TOOL_CALLS]g[ARGS]{}", "ok"),
        (llama, LLAMA_G, None),
    ],
)
def test_every_round_of_an_output_with_calls_gives_the_same_answer(
    parser: NewParser, text: str, content: str | None
) -> None:
    tokens = [*text.encode(), EOS]
    one_at_a_time = answers([[token] for token in tokens], (), new_parser=parser)
    assert one_at_a_time[0]["finish_reason"] == "tool_calls"
    assert one_at_a_time[0]["message"]["content"] == content
    for size in range(1, len(tokens) + 1):
        blocks = [tokens[at : at + size] for at in range(0, len(tokens), size)]
        assert answers(blocks, (), new_parser=parser) == one_at_a_time
    # At its limit, an output with a call ends as others do.
    cut_off = answers([tokens[:-1]], (), max_tokens=len(tokens) - 1, new_parser=parser)
    assert cut_off[0]["finish_reason"] == "length"


def reasoned(cut: Sequence[str], is_open: bool) -> tuple[str, str, list[str]]:
    """Reasoning, content and names of calls of a text that comes in these pieces."""
    parser = ReasonedAnswer(tagged(), is_open)
    found = [piece for index, text in enumerate(cut) for piece in parser.push(text, index == len(cut) - 1)]
    reasoning = [piece.text for piece in found if isinstance(piece, ReasoningDelta)]
    assert all(reasoning)
    content = "".join(piece for piece in found if isinstance(piece, str))
    return "".join(reasoning), content, [piece.name or "" for piece in found if isinstance(piece, CallDelta)]


REASONED: list[tuple[str, bool, str, str, list[str]]] = [
    ("<think>\nA b.\n\nc\n</think>\n\nYes <b>.", False, "A b.\n\nc", "Yes <b>.", []),
    ("\n<think></think> Yes", False, "", "Yes", []),
    (f"<think>f < g</think>\n<tool_call>{F}</tool_call>", False, "f < g", "", ["f"]),
    (f"<think><tool_call>{F}</tool_call></think>ok", False, f"<tool_call>{F}</tool_call>", "ok", []),
    # Cut off by max_tokens, within the tag too.
    ("<think>so </thi", False, "so </thi", "", []),
    ("<thi", False, "", "<thi", []),
    # Not at the beginning.
    (" a <think>b</think>", False, "", " a <think>b</think>", []),
    ("no </think> tag", False, "", "no </think> tag", []),
    # The prompt has opened it.
    ("A b.\n</think>\nYes </think>", True, "A b.", "Yes </think>", []),
    ("\n<think>A</think>Yes", True, "A", "Yes", []),
    ("<t", True, "<t", "", []),
    (" \n", True, "", "", []),
]


@pytest.mark.parametrize(("text", "is_open", "reasoning", "content", "calls"), REASONED)
def test_reasoning_is_found_however_its_text_is_cut(
    text: str, is_open: bool, reasoning: str, content: str, calls: list[str]
) -> None:
    expected = (reasoning, content, calls)
    assert reasoned([text], is_open) == expected
    assert reasoned([*text, ""], is_open) == expected
    for a, b in itertools.combinations_with_replacement(range(len(text) + 1), 2):
        assert reasoned([text[:a], text[a:b], text[b:]], is_open) == expected


@given(
    parts=st.lists(
        st.sampled_from(["<think>", "</think>", f"<tool_call>{F}</tool_call>", "<", "</thi", " ", "\n", "text"]),
        max_size=8,
    ),
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    is_open=st.booleans(),
)
def test_any_text_gives_the_same_reasoning_in_every_cut(parts: list[str], sizes: list[int], is_open: bool) -> None:
    text = "".join(parts)
    cut = cut_in_turn(text, sizes)
    assert reasoned(cut, is_open) == reasoned([*text, ""], is_open)


def test_every_round_of_an_output_with_reasoning_gives_the_same_answer() -> None:
    tokens = [*f"<think>a</think>ok <tool_call>{G}</tool_call>".encode(), EOS]

    def parser() -> AnswerParser:
        return ReasonedAnswer(tagged(), False)

    one_at_a_time = answers([[token] for token in tokens], (), new_parser=parser)
    message = one_at_a_time[0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("a", "ok")
    assert one_at_a_time[0]["finish_reason"] == "tool_calls"
    for size in range(1, len(tokens) + 1):
        blocks = [tokens[at : at + size] for at in range(0, len(tokens), size)]
        assert answers(blocks, (), new_parser=parser) == one_at_a_time


def test_calls_in_a_format_of_a_newer_orchestrator_are_read_as_hermes() -> None:
    assert _call_format(inference_pb2.GetModelInfoResponse(call_format="of tomorrow")) is CallFormat.HERMES
