"""When a head in the verifier drafts: as long as its drafts bring more than they cost all sequences of a pass."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace

import pytest

from coppice.core.sampling import SamplingParams
from coppice.core.tree import EMPTY_TREE, TokenTree, chain
from verifier_svc.extras.head.head import HeadDrafts, HeadSettings

PROMPT = (1, 2, 3)
GREEDY, SAMPLED = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)


class FakeHead:
    """A head whose drafts take a time, and are chains."""

    def __init__(self, draft_s: float = 0.001) -> None:
        self.now_s = 0.0
        self.draft_s = draft_s
        self.told: list[tuple[tuple[int, ...], bytes]] = []
        self.pieces = 0
        self.least: list[float] = []
        self.num_opened = 0

    def open(self, prompt: Sequence[int], sampling: SamplingParams) -> FakeHead:
        assert tuple(prompt) == PROMPT
        self.num_opened += 1
        return self

    def extend(self, token_ids: Sequence[int], features: bytes = b"") -> None:
        self.told.append((tuple(token_ids), features))

    def see_prompt(self, first_token: int, features: bytes) -> None:
        self.pieces += 1

    def read(self, max_pieces: int) -> int:
        self.pieces = max(0, self.pieces - max_pieces)
        return self.pieces

    def draft(self, max_nodes: int, row_multiple: int = 1, least_probability: float = 0.0) -> TokenTree:
        self.now_s += self.draft_s
        self.least.append(least_probability)
        return chain(range(max_nodes))


def settings_of(head: FakeHead, own_s: float = 0.008, row_s: float = 0.0005) -> HeadSettings:
    settings = HeadSettings(head, 8, clock=lambda: head.now_s)
    for rows in (1, 9) * 40:
        settings.cost.add(rows, own_s + row_s * rows)
    return settings


def open_all(settings: HeadSettings, count: int) -> list[HeadDrafts]:
    return [HeadDrafts(settings, PROMPT, GREEDY, 8) for _ in range(count)]


def draft(drafts: HeadDrafts, num_sequences: int = 1) -> TokenTree:
    return drafts.draft(num_sequences) if drafts.pays(num_sequences) else EMPTY_TREE


def rounds(drafts: HeadDrafts, count: int, num_accepted: int, num_sequences: int = 1) -> int:
    """Rounds with a draft, of which so many nodes are right each time."""
    number = 0
    for _ in range(count):
        drafted = len(draft(drafts, num_sequences)) > 0
        number += drafted
        drafts.committed([7] * (1 + num_accepted * drafted), b"x", num_accepted if drafted else None)
    return number


def test_it_drafts_every_round_while_that_pays() -> None:
    head = FakeHead()
    drafts = HeadDrafts(settings_of(head), PROMPT, GREEDY, 8)
    assert rounds(drafts, 100, num_accepted=2) == 100
    # The head is told of every round before the next draft.
    assert len(head.told) == 99


def test_a_head_that_is_never_right_is_hardly_asked() -> None:
    settings = settings_of(FakeHead())
    for _ in range(8):
        rounds(HeadDrafts(settings, PROMPT, GREEDY, 8), 500, num_accepted=0)
    assert rounds(HeadDrafts(settings, PROMPT, GREEDY, 8), 500, num_accepted=0) <= 3
    # What greedy requests have shown says nothing of sampled ones.
    assert rounds(HeadDrafts(settings, PROMPT, SAMPLED, 8), 5, num_accepted=0) == 5


def test_one_sequence_without_luck_pauses_by_itself_and_tries_again() -> None:
    settings = settings_of(FakeHead())
    rounds(HeadDrafts(settings, PROMPT, GREEDY, 8), 300, num_accepted=2)
    unlucky, lucky = (HeadDrafts(settings, PROMPT, GREEDY, 8) for _ in range(2))
    number = 0
    for _ in range(100):
        number += rounds(unlucky, 1, num_accepted=0)
        assert rounds(lucky, 3, num_accepted=2) == 3
    assert 20 < number < 90
    assert rounds(unlucky, 40, num_accepted=8) > 0


@pytest.mark.parametrize("num_sequences", [8, 64])
def test_it_does_not_draft_where_no_draft_could_pay(num_sequences: int) -> None:
    """Drafts for so many sequences take longer than the pass that they could save."""
    head = FakeHead(draft_s=0.004)
    settings = settings_of(head)
    rounds(HeadDrafts(settings, PROMPT, GREEDY, 8), 10, num_accepted=2)
    assert rounds(HeadDrafts(settings, PROMPT, GREEDY, 8), 300, 2, num_sequences) == 0


def test_more_sequences_pay_where_threads_draft_at_once() -> None:
    head = FakeHead(draft_s=0.008)
    settings = settings_of(head, row_s=0.00001)
    rounds(HeadDrafts(settings, PROMPT, GREEDY, 8), 100, num_accepted=2)
    for num_threads, num_rounds in ((1, 0), (4, 300)):
        drafts = HeadDrafts(replace(settings, num_threads=num_threads), PROMPT, GREEDY, 8)
        assert rounds(drafts, 300, 2, num_sequences=4) == num_rounds


def test_nodes_have_to_be_likelier_where_more_sequences_pay_for_their_rows() -> None:
    head = FakeHead(draft_s=0.0001)
    drafts = HeadDrafts(settings_of(head), PROMPT, GREEDY, 8)
    rounds(drafts, 5, 2, num_sequences=1)
    rounds(drafts, 5, 2, num_sequences=4)
    assert 0.02 <= head.least[0] < head.least[-1] < 1


def test_a_long_prompt_is_read_a_piece_a_round() -> None:
    head = FakeHead()
    drafts = HeadDrafts(settings_of(head), PROMPT, GREEDY, 8)
    for first in range(5):
        drafts.see_prompt(first, b"")
    assert [rounds(drafts, 1, 2) for _ in range(6)] == [0, 0, 0, 0, 1, 1]


def test_what_was_long_ago_keeps_its_tokens_and_not_its_features() -> None:
    head = FakeHead(draft_s=1.0)
    settings = settings_of(head)
    rounds(HeadDrafts(settings, PROMPT, GREEDY, 8), 2, 0)
    head.told.clear()
    head.num_opened = 0
    drafts = HeadDrafts(settings, PROMPT, GREEDY, 8)
    for number in range(100):
        assert len(draft(drafts, 8)) == 0
        drafts.committed([number], b"x", None)
    # Where no draft pays it costs nothing.
    assert (head.told, head.num_opened) == ([], 0)
    drafts.draft(1)
    assert head.told == [(tuple(range(36)), b""), *(((number,), b"x") for number in range(36, 100))]
    drafts.draft(1)
    assert (len(head.told), head.num_opened) == (65, 1)


def test_features_are_wanted_only_where_a_draft_may_follow() -> None:
    settings = settings_of(FakeHead())
    drafts = HeadDrafts(settings, PROMPT, GREEDY, 8)
    rounds(drafts, 5, 2)
    assert drafts.wants_features
    rounds(drafts, 1, 2, num_sequences=64)
    # Nor are those of prompts, until load falls.
    further = HeadDrafts(replace(settings, max_prompt_features=512), PROMPT, GREEDY, 8)
    assert (drafts.wants_features, further.wants_features, further.max_prompt_features) == (False, False, 0)
    rounds(drafts, 1, 2)
    assert drafts.wants_features
    assert HeadDrafts(replace(settings, max_prompt_features=512), PROMPT, GREEDY, 8).max_prompt_features == 512


def test_features_are_wanted_again_some_rounds_before_a_trial() -> None:
    settings = settings_of(FakeHead())
    for _ in range(40):
        rounds(HeadDrafts(settings, PROMPT, GREEDY, 8), 100, num_accepted=0)
    drafts = HeadDrafts(settings, PROMPT, GREEDY, 8)
    wanted: list[bool] = []
    # From one trial to the next.
    for _ in range(2):
        wanted.clear()
        while not len(draft(drafts)):
            wanted.append(drafts.wants_features)
            drafts.committed([7], b"x", None)
        drafts.committed([7], b"x", 0)
    assert len(wanted) > 100
    assert wanted[-7:] == [True] * 7
    assert not any(wanted[:-8])


def test_only_so_many_sequences_hold_states() -> None:
    settings = settings_of(FakeHead())
    all_of_them = open_all(settings, 16)
    assert not settings.has_room
    del all_of_them[0]
    gc.collect()
    assert settings.has_room
