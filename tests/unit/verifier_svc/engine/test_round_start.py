"""When a round starts with what is there: a share of what drafts usually promise decides."""

from __future__ import annotations

import pytest

from coppice.core.tree import EMPTY_TREE, chain
from verifier_svc.engine.mailbox import Mailbox
from verifier_svc.engine.round_start import WORTH_STARTING, RoundPromise, has_draft_to_start_with

TOKENS = [1, 2, 3]
BUDGET, ROOM = 8, 100


def usual(*depths: int) -> RoundPromise:
    """After drafts of certain tokens, so many each."""
    promise = RoundPromise()
    for depth in depths:
        promise.add(chain([5] * depth), BUDGET)
    return promise


@pytest.mark.parametrize(("left", "starts"), [(1, False), (2, False), (3, True), (5, True)])
def test_what_is_left_must_promise_most_of_what_drafts_do(left: int, starts: bool) -> None:
    mailbox = Mailbox()
    mailbox.put(1, chain([2, 3] + [5] * left), TOKENS)
    assert has_draft_to_start_with(mailbox, BUDGET, usual(5), ROOM) is starts


def test_nobody_waits_for_more_than_there_is_room_for() -> None:
    mailbox = Mailbox()
    mailbox.put(1, chain([2, 3, 5]), TOKENS)
    assert not has_draft_to_start_with(mailbox, BUDGET, usual(5), 3)
    assert has_draft_to_start_with(mailbox, BUDGET, usual(5), 2)


def test_a_fresh_draft_need_not_promise_anything_and_none_is_waited_for() -> None:
    mailbox = Mailbox()
    assert not has_draft_to_start_with(mailbox, BUDGET, usual(5), ROOM)
    mailbox.put(3, EMPTY_TREE, TOKENS)
    assert has_draft_to_start_with(mailbox, BUDGET, usual(5), ROOM)


def test_the_usual_promise_is_a_running_mean_of_what_a_round_may_verify() -> None:
    assert usual(6).tokens == 6
    assert usual(20).tokens == BUDGET
    assert 2 < usual(6, 2).tokens < 6
    assert usual(6, 0, 0).tokens == 6
    assert 0 < WORTH_STARTING < 1
