"""The mailbox: late drafts are re-rooted, early ones wait, and what a round leaves over serves the next."""

from __future__ import annotations

from coppice.core.tree import EMPTY_TREE, TokenTree, chain
from verifier_svc.engine.draft_counts import DraftCounts, DraftOrigin
from verifier_svc.engine.mailbox import ExactMailbox, Mailbox

TOKENS = [1, 2, 3]


def paths(tree: TokenTree | None) -> list[tuple[int, ...]] | None:
    return None if tree is None else list(tree.paths())


def test_a_draft_for_the_committed_length_is_fresh() -> None:
    mailbox = Mailbox()
    mailbox.put(3, chain([7, 8]), TOKENS)
    assert mailbox.is_fresh
    assert paths(mailbox.tree) == [(7,), (7, 8)]


def test_an_empty_draft_says_that_nothing_better_will_come() -> None:
    mailbox = Mailbox()
    mailbox.put(3, EMPTY_TREE, TOKENS)
    assert mailbox.is_fresh
    assert paths(mailbox.tree) == []


def test_what_hangs_behind_the_outcome_is_kept_and_not_fresh() -> None:
    mailbox = Mailbox()
    mailbox.put(3, TokenTree((7, 8, 9, 4), (-1, 0, 1, -1), (0.0,) * 4), TOKENS)
    mailbox.advance([7, 8], [*TOKENS, 7, 8])
    assert paths(mailbox.tree) == [(9,)]
    assert not mailbox.is_fresh
    mailbox.advance([5], [*TOKENS, 7, 8, 5])
    assert mailbox.tree is None


def test_a_late_draft_is_re_rooted_along_the_committed_tokens() -> None:
    mailbox = Mailbox()
    mailbox.put(1, chain([2, 3, 7, 8]), TOKENS)
    assert paths(mailbox.tree) == [(7,), (7, 8)]
    assert not mailbox.is_fresh
    assert mailbox.take_stale() == 0


def test_a_late_draft_that_the_tokens_left_is_stale() -> None:
    mailbox = Mailbox()
    mailbox.put(1, chain([2, 4, 7]), TOKENS)
    assert mailbox.tree is None
    assert mailbox.take_stale() == 1
    assert mailbox.take_stale() == 0


def test_a_late_draft_replaces_a_worse_one_and_never_a_fresh_one() -> None:
    mailbox = Mailbox()
    mailbox.put(2, chain([3, 7], [0.0, -2.0]), TOKENS)
    mailbox.put(2, chain([3, 8], [0.0, -1.0]), TOKENS)
    assert paths(mailbox.tree) == [(8,)]
    mailbox.put(2, chain([3, 9], [0.0, -3.0]), TOKENS)
    assert paths(mailbox.tree) == [(8,)]
    mailbox.put(3, chain([5], [-4.0]), TOKENS)
    mailbox.put(2, chain([3, 8], [0.0, -1.0]), TOKENS)
    assert paths(mailbox.tree) == [(5,)]


def test_a_draft_for_a_length_to_come_waits_for_it() -> None:
    mailbox = Mailbox()
    mailbox.put(5, chain([7]), TOKENS)
    assert mailbox.tree is None
    mailbox.advance([4, 6], [*TOKENS, 4, 6])
    assert paths(mailbox.tree) == [(7,)]
    assert mailbox.is_fresh


def test_a_sender_that_has_lost_track_fills_no_memory() -> None:
    mailbox = Mailbox()
    for length in range(10, 100):
        mailbox.put(length, chain([7]), TOKENS)
    assert mailbox.take_stale() == 82


def test_a_sampled_tree_is_for_its_own_round_alone() -> None:
    mailbox = ExactMailbox()
    mailbox.put(2, chain([3, 7]), TOKENS)
    mailbox.put(4, chain([7]), TOKENS)
    assert mailbox.tree is None
    assert not mailbox.is_fresh
    assert (mailbox.take_stale(), mailbox.take_stale()) == (2, 0)
    mailbox.put(3, chain([7, 8]), TOKENS)
    assert mailbox.is_fresh
    assert paths(mailbox.tree) == [(7,), (7, 8)]
    mailbox.advance([7], [*TOKENS, 7])
    assert mailbox.tree is None
    assert not mailbox.is_fresh


def test_every_draft_with_nodes_is_counted_once_by_what_became_of_it() -> None:
    counts = DraftCounts()
    mailbox = Mailbox(counts)
    mailbox.put(3, EMPTY_TREE, TOKENS)
    assert counts == DraftCounts()
    # For a round to come: counted when that comes.
    mailbox.put(5, chain([7]), TOKENS)
    assert counts == DraftCounts()
    mailbox.advance([4, 6], [*TOKENS, 4, 6])
    assert counts == DraftCounts(in_time=1)
    tokens = [*TOKENS, 4, 6]
    # A fresh draft is there.
    mailbox.put(4, chain([6, 9]), tokens)
    mailbox.put(4, chain([5, 9]), tokens)
    mailbox.advance([8], [*tokens, 8])
    mailbox.put(4, chain([6, 8, 1]), [*tokens, 8])
    assert (counts.in_time, counts.late) == (1, 1)
    assert counts.stale == {"left": 1, "worse": 1, "ahead": 0, "sampled": 0, "missed": 0}
    for length in range(10, 20):
        mailbox.put(length, chain([7]), [*tokens, 8])
    sampled = ExactMailbox(counts)
    sampled.put(3, chain([7]), TOKENS)
    sampled.put(2, chain([3, 7]), TOKENS)
    assert (counts.in_time, counts.late) == (2, 1)
    assert counts.stale == {"left": 1, "worse": 1, "ahead": 2, "sampled": 1, "missed": 0}


def test_in_a_synchronous_sequence_a_draft_is_for_its_own_round_alone() -> None:
    counts = DraftCounts()
    mailbox = ExactMailbox(counts, is_sampled=False)
    mailbox.put(2, chain([3, 7]), TOKENS)
    assert mailbox.tree is None
    mailbox.put(3, chain([7, 8]), TOKENS)
    mailbox.advance([7], [*TOKENS, 7])
    assert mailbox.tree is None
    assert counts.in_time == 1
    assert counts.stale == {"left": 0, "worse": 0, "ahead": 0, "sampled": 0, "missed": 1}


def test_a_draft_says_whether_it_was_made_before_its_outcome_was_known() -> None:
    mailbox = Mailbox()
    tokens = list(TOKENS)

    def commit(*token_ids: int) -> None:
        tokens.extend(token_ids)
        mailbox.advance(token_ids, tokens)

    mailbox.put(3, chain([7, 8, 9]), tokens)
    assert mailbox.origin is DraftOrigin.FRESH
    commit(7)
    assert (paths(mailbox.tree), mailbox.origin) == ([(8,), (8, 9)], DraftOrigin.LEFT_OVER)
    # Grown meanwhile, and better than what was left.
    mailbox.put(3, chain([7, 8, 9, 1]), tokens)
    assert (mailbox.tree and len(mailbox.tree), mailbox.origin) == (3, DraftOrigin.REROOTED)
    mailbox.put(6, chain([4]), tokens)
    commit(8, 5)
    assert (paths(mailbox.tree), mailbox.origin) == ([(4,)], DraftOrigin.AHEAD)
    # One that was made now replaces it.
    mailbox.put(6, chain([2]), tokens)
    assert mailbox.origin is DraftOrigin.FRESH


# Behind 7: 8 and then 4 and 5; behind 7, 8: 6 and then 2.
AHEAD = TokenTree((7, 9, 4, 5, 8, 6, 2), (-1, 0, 1, 2, 0, 4, 5), (0.0, -0.5, 0.0, 0.0, 0.0, -1.0, 0.0))


def test_what_was_drafted_ahead_is_no_draft_until_its_outcome_comes() -> None:
    counts = DraftCounts()
    mailbox = Mailbox(counts)
    mailbox.put_ahead(3, AHEAD, TOKENS)
    assert mailbox.tree is None
    mailbox.put(3, chain([7, 8]), TOKENS)
    assert paths(mailbox.tree) == [(7,), (7, 8)]
    mailbox.advance([7, 9], [*TOKENS, 7, 9])
    assert (paths(mailbox.tree), mailbox.origin, mailbox.is_fresh) == ([(4,), (4, 5)], DraftOrigin.AHEAD, False)
    # A fresh one is made for the outcome, too, and knows more.
    mailbox.put(5, chain([4]), [*TOKENS, 7, 9])
    assert (paths(mailbox.tree), mailbox.origin) == ([(4,)], DraftOrigin.FRESH)
    assert (counts.ahead_hits, counts.ahead_misses) == (1, 0)


def test_an_outcome_that_nobody_drafted_for_leaves_nothing_of_it() -> None:
    counts = DraftCounts()
    mailbox = Mailbox(counts)
    mailbox.put_ahead(3, AHEAD, TOKENS)
    mailbox.advance([7, 3], [*TOKENS, 7, 3])
    mailbox.advance([9], [*TOKENS, 7, 3, 9])
    assert mailbox.tree is None
    assert (counts.ahead_hits, counts.ahead_misses) == (0, 1)
    assert mailbox.take_stale() == 0


def test_what_came_in_time_but_was_put_after_the_outcome_counts_as_drafted_ahead() -> None:
    counts = DraftCounts()
    mailbox = Mailbox(counts)
    mailbox.put(1, chain([2, 3, 8]), TOKENS)
    tokens = [*TOKENS, 7, 9]
    mailbox.advance([7, 9], tokens)
    mailbox.put_ahead(3, AHEAD, tokens, in_time=True)
    assert (paths(mailbox.tree), mailbox.origin) == ([(4,), (4, 5)], DraftOrigin.AHEAD)
    mailbox.put_ahead(3, chain([1]), tokens, in_time=True)
    assert (counts.ahead_hits, counts.ahead_misses, counts.late) == (1, 1, 1)
    # Nothing goes before a draft that was made for the round.
    mailbox.put(5, chain([6]), tokens)
    mailbox.put_ahead(3, AHEAD, tokens, in_time=True)
    assert (paths(mailbox.tree), mailbox.origin) == ([(6,)], DraftOrigin.FRESH)


def test_what_is_left_over_stays_where_it_promises_more() -> None:
    mailbox = Mailbox()
    mailbox.put(3, chain([7, 8, 6, 3, 3]), TOKENS)
    mailbox.put_ahead(3, AHEAD, TOKENS)
    mailbox.advance([7, 8, 6], [*TOKENS, 7, 8, 6])
    assert (paths(mailbox.tree), mailbox.origin) == ([(3,), (3, 3)], DraftOrigin.LEFT_OVER)


def test_drafted_ahead_and_late_is_re_rooted_and_too_early_is_stale() -> None:
    counts = DraftCounts()
    mailbox = Mailbox(counts)
    mailbox.put_ahead(1, chain([2, 3, 8]), TOKENS)
    assert (paths(mailbox.tree), mailbox.origin) == ([(8,)], DraftOrigin.REROOTED)
    mailbox.put_ahead(4, AHEAD, TOKENS)
    mailbox.put_ahead(1, chain([2, 4]), TOKENS)
    assert (counts.stale["ahead"], counts.stale["left"]) == (1, 1)


def test_synchronous_and_sampled_sequences_use_nothing_that_was_drafted_ahead() -> None:
    for is_sampled in (False, True):
        mailbox = ExactMailbox(is_sampled=is_sampled)
        mailbox.put_ahead(3, AHEAD, TOKENS)
        mailbox.advance([7, 9], [*TOKENS, 7, 9])
        assert mailbox.tree is None
        assert mailbox.take_stale() == 1
