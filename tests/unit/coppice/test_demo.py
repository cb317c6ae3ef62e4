"""The demo compares tokens, not text, and says so when they differ. (With real services: tests/e2e.)"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from coppice.cli.demo import PROMPTS, QUESTIONS, Comparison, DemoRun, compare_all, describe, summarise
from coppice.client import Chunk, Client, Options
from coppice.completion import Completion, Speculation, Timing, Usage

COMPLETION = Completion(
    request_id="r",
    seed=20,
    text="\n    return a + b",
    token_ids=(5, 6, 7, 8),
    finish_reason="length",
    stop_match=None,
    usage=Usage(3, 4),
    speculation=Speculation(rounds=2, draft_tokens=8, accepted_tokens=2, mean_acceptance_length=2.0),
    timing=Timing(),
)


class ScriptedStream:
    """One chunk, and the completion."""

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        yield Chunk(COMPLETION.text, COMPLETION.token_ids)

    def result(self) -> Completion:
        return COMPLETION


class ScriptedClient(Client):
    """Answers every request alike, and writes down what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Options]] = []

    def stream(self, prompt: str | Sequence[int], options: Options | None = None, timeout_s: float = 1.0) -> Any:
        assert isinstance(prompt, str)
        assert options is not None
        self.asked.append((prompt, options))
        return ScriptedStream()

    def stream_chat(
        self, messages: Sequence[Mapping[str, str]], options: Options | None = None, timeout_s: float = 1.0
    ) -> Any:
        [message] = messages
        assert message["role"] == "user"
        return self.stream(message["content"], options, timeout_s)


def comparison(plain: Completion, speculative: Completion) -> Comparison:
    return Comparison(PROMPTS[0], 0.0, DemoRun(plain, 4.0), DemoRun(speculative, 2.0))


def test_figures_come_from_tokens_and_wall_time() -> None:
    same = comparison(COMPLETION, COMPLETION)
    assert (same.plain.tokens_per_s, same.speculative.tokens_per_s) == (1.0, 2.0)
    assert (same.ratio, same.tau, same.is_identical) == (2.0, 2.0, True)
    text = describe(same)
    assert "2.00x" in text
    assert "τ 2.00" in text
    assert "identical: yes" in text
    assert COMPLETION.text not in text, "it has been streamed"


@pytest.mark.parametrize(
    "other",
    [
        replace(COMPLETION, token_ids=(5, 6, 7, 9)),
        replace(COMPLETION, token_ids=(5, 6, 7)),
        replace(COMPLETION, finish_reason="eos"),
    ],
    ids=["another token", "one token less", "another reason"],
)
def test_the_same_text_from_other_tokens_is_not_identical(other: Completion) -> None:
    different = comparison(COMPLETION, other)
    assert not different.is_identical
    assert "identical: no" in describe(different)
    assert describe(different).count(COMPLETION.text) == 2
    assert "identical: NO (1 of 2" in summarise([comparison(COMPLETION, COMPLETION), different])


async def test_both_ways_are_asked_in_turn_with_one_seed() -> None:
    client = ScriptedClient()
    shown: list[str] = []
    streamed: list[str] = []
    comparisons = await compare_all(client, PROMPTS[:4], 128, shown.append, streamed.append)
    assert len(comparisons) == 8
    assert streamed == [COMPLETION.text] * 8
    assert PROMPTS[0].prompt in shown[0]
    assert "identical: yes (8 of 8" in shown[-1]
    measured = client.asked[2:]
    assert [options.speculation for _, options in measured[:4]] == ["off", "auto", "auto", "off"]
    assert {options.seed for _, options in measured} == {20}
    assert {options.temperature for _, options in measured} == {0.0, 1.0}
    for first, second in zip(measured[::2], measured[1::2], strict=True):
        assert first[0] == second[0]
        assert first[1].cache_salt != second[1].cache_salt, "neither finds what the other has computed"
        same: dict[str, Any] = {"speculation": "", "cache_salt": ""}
        assert replace(first[1], **same) == replace(second[1], **same)


async def test_questions_are_asked_of_the_chat_template() -> None:
    client = ScriptedClient()
    comparisons = await compare_all(client, QUESTIONS, 64, lambda _: None)
    assert len(QUESTIONS) == 6
    assert [one.temperature for one in comparisons] == [0.0] * 6 + [1.0] * 2
    assert {prompt for prompt, _ in client.asked} == {question.prompt for question in QUESTIONS}


def test_prompts_end_where_a_word_ends() -> None:
    assert len(PROMPTS) >= 4
    for prompt in PROMPTS:
        assert prompt.prompt == prompt.prompt.rstrip()
    assert len({prompt.name for prompt in PROMPTS}) == len(PROMPTS)
