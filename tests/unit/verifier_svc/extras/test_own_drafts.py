"""Which of the verifier's own drafts goes into the next round."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import Mock

import pytest

from coppice.core.sampling import SamplingParams
from coppice.core.tree import TokenTree
from tests.unit.verifier_svc.extras.head.test_head_drafts import FakeHead, settings_of
from verifier_svc.extras.head.head import HeadSettings
from verifier_svc.extras.lookup.lookup import LookupSettings, PromptLookup
from verifier_svc.extras.own_drafts import HeadThreads, OwnDrafts

PROMPT = (1, 2, 3)
GREEDY = SamplingParams(temperature=0.0)
REPEATING = [5, 6, 7, 8, 9, 10, 11, 12] * 8


def own(head: HeadSettings | None, lookup: LookupSettings | None) -> OwnDrafts:
    return OwnDrafts(PROMPT, GREEDY, lookup, 8, head, 8)


def sources(drafts: OwnDrafts, tokens: Sequence[int], num_sequences: int = 1) -> tuple[str, ...]:
    return drafted(drafts, tokens, num_sequences).source_names


def drafted(drafts: OwnDrafts, tokens: Sequence[int], num_sequences: int = 1) -> TokenTree:
    if drafts.begin(tokens, num_sequences):
        HeadThreads(2).ask([drafts], num_sequences)
    return drafts.take()


def test_a_text_that_repeats_itself_is_looked_up_and_any_other_is_the_head_s() -> None:
    head = FakeHead()
    drafts = own(settings_of(head), LookupSettings(8))
    assert sources(drafts, REPEATING) == ("prompt-lookup",)
    assert head.now_s == 0
    drafts = own(settings_of(head), LookupSettings(8))
    assert sources(drafts, [*PROMPT, 4]) != ("prompt-lookup",)
    assert head.now_s > 0


def test_what_was_found_is_taken_where_the_head_does_not_pay() -> None:
    settings = settings_of(FakeHead(draft_s=1.0))
    drafts = own(settings, LookupSettings(8))
    settings.time.add(1.0)
    assert sources(drafts, REPEATING[:11], num_sequences=2) == ("prompt-lookup",)


def test_with_neither_there_are_none() -> None:
    drafts = own(None, None)
    assert len(drafted(drafts, REPEATING, 1)) == 0
    assert (drafts.wants_features, drafts.max_prompt_features) == (False, 0)
    drafts.committed([1], b"", None)
    drafts.see_prompt(1, b"x")


class Meeting(FakeHead):
    """A head whose drafts wait for each other."""

    def __init__(self, num_threads: int) -> None:
        super().__init__()
        self.barrier = threading.Barrier(num_threads, timeout=30)

    def draft(self, max_nodes: int, row_multiple: int = 1, least_probability: float = 0.0) -> TokenTree:
        self.barrier.wait()
        return super().draft(max_nodes, row_multiple, least_probability)


def test_heads_of_several_sequences_draft_at_once() -> None:
    settings = replace(settings_of(Meeting(3)), num_threads=3)
    drafts = [own(settings, None) for _ in range(6)]
    assert all(one.begin(PROMPT, 1) for one in drafts)
    HeadThreads(3).ask(drafts, 1)
    assert all(len(one.take()) for one in drafts)
    assert not any(len(one.take()) for one in drafts)


class Broken(FakeHead):
    def draft(self, max_nodes: int, row_multiple: int = 1, least_probability: float = 0.0) -> TokenTree:
        raise KeyError("a bug")


def test_a_head_that_fails_ends_its_own_drafts_alone(caplog: pytest.LogCaptureFixture) -> None:
    broken, sound = own(settings_of(Broken()), LookupSettings(8)), own(settings_of(FakeHead()), None)
    threads = HeadThreads(2)
    assert broken.begin([*PROMPT, 4], 2)
    assert sound.begin([*PROMPT, 4], 2)
    threads.ask([broken, sound], 2)
    assert (len(broken.take()), len(sound.take())) == (0, 8)
    assert "the head failed to draft" in caplog.text
    assert sources(broken, REPEATING) == ("prompt-lookup",)
    assert not broken.begin([*PROMPT, 4], 1)


def test_a_lookup_that_fails_ends_no_sequence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    drafts = own(settings_of(FakeHead()), LookupSettings(8))
    assert sources(drafts, REPEATING) == ("prompt-lookup",)
    with monkeypatch.context() as patch:
        patch.setattr(PromptLookup, "draft", Mock(side_effect=KeyError("a bug")))
        assert len(drafted(drafts, REPEATING)) == 0
    assert "own drafts failed" in caplog.text
    assert len(drafted(drafts, REPEATING)) == 0
