"""Which ends of a round get masks, and who gets how many rows for them."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from coppice.tree import EMPTY_TREE, ROOT, TokenTree
from verifier_svc.mask_groups import MaskGroup, MaskShape, choose_groups, end_probabilities, mask_parents, rows_behind
from verifier_svc.mask_shares import deal_masks
from verifier_svc.pass_shares import Share
from verifier_svc.sequence import SequenceKey

SHAPE = MaskShape(num_masks=3, num_groups=2)


def tree(*nodes: tuple[int, float]) -> TokenTree:
    """Nodes as (parent, probability)."""
    return TokenTree(
        tuple(range(len(nodes))), tuple(parent for parent, _ in nodes), tuple(math.log(share) for _, share in nodes)
    )


def share(pending: int = 1, nodes: int = 0, shape: MaskShape | None = SHAPE, more: int = 0) -> Share:
    sequence: Any = SimpleNamespace(mask_shape=shape, num_pending=pending + more)
    return Share(SequenceKey(0, 0), sequence, pending, nodes)


def dealt(*shares: Share, free: int = 16, own: float = 0.0, most: int = 0) -> list[int]:
    return [one.max_masks for one in deal_masks(shares, free_rows=free, own_rows=own, max_rows=most)]


def test_a_path_ends_where_its_probability_is_not_its_childrens() -> None:
    ends = end_probabilities(tree((ROOT, 0.6), (0, 0.5), (ROOT, 0.3), (0, 0.2)))
    assert ends == pytest.approx([0.18, 0.3, 0.3, 0.12, 0.1])


def test_masks_go_where_they_promise_most() -> None:
    likely = tree((ROOT, 0.9), (0, 0.9), (1, 0.1))
    # Ends: 0.09, 0.729, 0.081, and 0.1 of the root. At 0.9, the root's promise 0.09, 0.081 and 0.073.
    assert choose_groups(likely, SHAPE, 99, 99, 0.9) == (MaskGroup(1, 3), MaskGroup(ROOT, 2))
    assert choose_groups(likely, MaskShape(1, 9), 99, 99, 0.9) == tuple(MaskGroup(n, 1) for n in (1, ROOT, 0))
    # At 0.4: 0.29, 0.12 and no more, and nothing behind another end.
    assert choose_groups(likely, SHAPE, 99, 99, 0.4) == (MaskGroup(1, 2),)
    assert choose_groups(tree((ROOT, 0.99)), SHAPE, 99, 99, 0.9) == (MaskGroup(0, 3),)
    assert choose_groups(likely, SHAPE, 99, 99, 0.05) == ()


def test_plain_decoding_has_masks_behind_its_root() -> None:
    assert choose_groups(EMPTY_TREE, SHAPE, 99, 99, 0.5) == (MaskGroup(ROOT, 3),)
    assert choose_groups(EMPTY_TREE, MaskShape(9, 2), 99, 99, 0.5) == (MaskGroup(ROOT, 3),)
    assert choose_groups(EMPTY_TREE, MaskShape(9, 2), 99, 99, 0.6) == (MaskGroup(ROOT, 4),)


def test_rows_and_room_bound_the_masks() -> None:
    two = tree((ROOT, 0.6))
    # 0.54, 0.49 and 0.44 behind the node, 0.36, 0.32 and 0.29 behind the root.
    assert choose_groups(two, SHAPE, 4, 99, 0.9) == (MaskGroup(0, 3), MaskGroup(ROOT, 1))
    # 0.3 and 0.15, and 0.2 and 0.1: a second mask may promise less than the first of another end.
    assert choose_groups(two, SHAPE, 3, 99, 0.5) == (MaskGroup(0, 2), MaskGroup(ROOT, 1))
    assert choose_groups(two, SHAPE, 0, 99, 0.9) == ()
    # With room for four tokens: the root's own, then two masks', and the next round's own.
    assert choose_groups(two, SHAPE, 99, 4, 0.9) == (MaskGroup(0, 1), MaskGroup(ROOT, 2))
    assert choose_groups(two, SHAPE, 99, 2, 0.9) == ()


def test_groups_are_chains_in_order() -> None:
    groups = (MaskGroup(1, 2), MaskGroup(ROOT, 1))
    assert mask_parents(groups, 4) == (1, 4, ROOT)
    assert rows_behind(groups, 1) == range(2)
    assert rows_behind(groups, ROOT) == range(2, 3)
    assert not rows_behind(groups, 0)


def test_one_sequence_has_all_its_masks_and_many_have_none() -> None:
    assert dealt(share()) == [6]
    assert dealt(share(nodes=7)) == [6]
    assert dealt(*[share(nodes=2)] * 5) == [1, 0, 0, 0, 0]
    assert dealt(*[share()] * 16) == [0] * 16
    assert dealt(*[share()] * 64) == [0] * 64


def test_everyone_gets_a_group_before_anyone_gets_two() -> None:
    assert dealt(share(), share(), share(), free=14) == [5, 3, 3]


def test_where_rows_are_known_to_cost_less_there_are_more_masks() -> None:
    # A quarter of 400 rows, less 16 roots: three for each, then three more for as many as there are rows for.
    assert dealt(*[share()] * 16, own=400.0) == [*[6] * 12, *[3] * 4]
    assert sum(dealt(*[share()] * 16, own=math.inf)) == 96
    assert dealt(*[share()] * 300, own=math.inf) == [0] * 300
    assert dealt(share(), own=400.0, most=4) == [3]


def test_parts_of_prompts_and_sequences_without_re_drafts_get_none() -> None:
    assert dealt(share(shape=None), share(pending=3, more=5), share(pending=3)) == [0, 0, 6]


def test_a_prompt_alone_may_grow_by_an_eighth() -> None:
    assert dealt(share(pending=40)) == [5]
    assert dealt(share(pending=200)) == [6]
    assert dealt(share(pending=200), share()) == [0, 0]
