"""Which ends of a round get masks, and who gets how many rows for them."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from coppice.core.tree import EMPTY_TREE, ROOT, TokenTree
from verifier_svc.engine.pass_shares import RowAllotment, deal_masks
from verifier_svc.engine.sequence import SequenceKey
from verifier_svc.extras.redraft.choice import FURTHER, MASK_PRICE, choose_groups, num_worth_verifying, path_ends
from verifier_svc.extras.redraft.groups import MaskGroup, MaskShape, mask_parents, masks_for
from verifier_svc.model.pass_curve import PassCurve

SHAPE = MaskShape(num_masks=3, num_groups=2)


def tree(*nodes: tuple[int, float]) -> TokenTree:
    """Nodes as (parent, probability)."""
    return TokenTree(
        tuple(range(len(nodes))), tuple(parent for parent, _ in nodes), tuple(math.log(share) for _, share in nodes)
    )


def share(pending: int = 1, nodes: int = 0, shape: MaskShape | None = SHAPE, more: int = 0) -> RowAllotment:
    sequence: Any = SimpleNamespace(mask_shape=shape, num_pending=pending + more)
    return RowAllotment(SequenceKey(0, 0), sequence, pending, nodes)


def dealt(*shares: RowAllotment, free: int = 16, own: float = 0.0, most: int = 0) -> list[int]:
    return [one.max_masks for one in deal_masks(shares, free_rows=free, own_rows=own, max_rows=most)]


def end_probabilities(grown: TokenTree) -> list[float]:
    ends, _, _ = path_ends(np.array(grown.parents, np.int64), np.array(grown.path_log_probs, np.float64))
    return ends.tolist()


def test_a_path_ends_where_its_probability_is_not_its_childrens() -> None:
    ends = end_probabilities(tree((ROOT, 0.6), (0, 0.5), (ROOT, 0.3), (0, 0.2)))
    assert ends == pytest.approx([0.18, 0.3, 0.3, 0.12, 0.1])


def chosen(
    grown: TokenTree, shape: MaskShape, most: int, room: int, hit_rate: float, price: float = 0.06, multiple: int = 1
) -> tuple[MaskGroup, ...]:
    return choose_groups(grown, shape, most, room, hit_rate, curve=steps(price, multiple), rate=1.0)


def steps(price: float, multiple: int) -> PassCurve:
    """Each row takes `price` of a pass, and rows come in multiples."""
    sizes = range(multiple, 41, multiple)
    return PassCurve.of_sizes(sizes, [1 + price * (size - multiple) for size in sizes])


def paid_for(curve: PassCurve, rows: int, more: int) -> float:
    return MASK_PRICE * more + curve.at(rows + more) - curve.at(rows)


def test_masks_go_where_they_promise_most() -> None:
    likely = tree((ROOT, 0.9), (0, 0.9), (1, 0.1))
    # Ends: 0.09, 0.729, 0.081, and 0.1 of the root. At 0.5 masks behind node 1 promise 0.36 + 0.04 (behind node 2),
    # then 0.15 and 0.05; those behind the root 0.05.
    assert chosen(likely, SHAPE, 99, 99, 0.5) == (MaskGroup(1, 2),)
    # At 0.9 the root's first two add 0.09, and 0.065 + 0.065 (a second mask is also of use behind node 0).
    assert chosen(likely, SHAPE, 99, 99, 0.9) == (MaskGroup(1, 3), MaskGroup(ROOT, 2))
    assert chosen(likely, MaskShape(1, 9), 99, 99, 0.95) == tuple(MaskGroup(n, 1) for n in (1, ROOT, 0))
    assert chosen(tree((ROOT, 0.99)), SHAPE, 99, 99, 0.9) == (MaskGroup(0, 3),)
    assert chosen(likely, SHAPE, 99, 99, 0.05) == ()


def test_masks_behind_the_root_serve_all_ends_that_have_none() -> None:
    # Each of three children is accepted as often as none of them: only the root is above them all.
    wide = tree((ROOT, 0.25), (ROOT, 0.25), (ROOT, 0.25))
    assert chosen(wide, MaskShape(3, 1), 99, 99, 0.8) == (MaskGroup(ROOT, 3),)
    # The second behind the root stands for the tokens behind three ends, and is worth more than a first behind one.
    assert chosen(wide, SHAPE, 2, 99, 0.8) == (MaskGroup(ROOT, 2),)


def test_chosen_masks_promise_most_of_all_small_choices() -> None:
    """By a slow value of whole choices, one more mask at a time, always the best."""
    generator = random.Random(5)
    for _ in range(150):
        drawn = tuple((generator.randrange(ROOT, node), generator.uniform(0.1, 0.5)) for node in range(5))
        shape = MaskShape(generator.randint(1, 4), generator.randint(1, 3))
        hit_rate, most = generator.uniform(0.3, 0.95), generator.randint(0, 7)
        grown = tree(*drawn)
        ends = end_probabilities(grown)
        if min(ends) < 0.01:
            continue
        likeliest = sorted(range(ROOT, 5), key=lambda node: (-ends[node], node))[: shape.num_groups]
        counts = dict.fromkeys([*likeliest, ROOT], 0)
        curve = steps(generator.uniform(0, 0.15), generator.choice([1, 2, 4]))
        worths = [0.0]
        for num_masks in range(1, most + 1):
            used = sum(1 for count in counts.values() if count)
            values = {
                node: slow_value(grown, {**counts, node: count + 1}, hit_rate)
                for node, count in counts.items()
                if count < shape.num_masks and (count or used < shape.num_groups)
            }
            best = max(values, key=lambda node: values[node], default=None)
            least = MASK_PRICE + min(curve.per_row, curve.at(6 + num_masks) - curve.at(5 + num_masks))
            if best is None or values[best] - slow_value(grown, counts, hit_rate) < least:
                break
            counts[best] += 1
            worths.append(values[best] - paid_for(curve, 6, num_masks))
        groups = choose_groups(grown, shape, most, 99, hit_rate, curve=curve, rate=1.0)
        num_masks = sum(group.num_masks for group in groups)
        value = slow_value(grown, {group.node: group.num_masks for group in groups}, hit_rate)
        assert value - paid_for(curve, 6, num_masks) == pytest.approx(max(worths))
        assert num_masks == worths.index(max(worths))


def slow_value(grown: TokenTree, counts: dict[int, int], hit_rate: float) -> float:
    """Accepted tokens that all masks together promise."""
    groups = tuple(MaskGroup(node, count) for node, count in counts.items() if count)
    ends = end_probabilities(grown)
    total = 0.0
    for end in range(ROOT, len(grown)):
        _, places = masks_for(groups, grown, end)
        rates = [hit_rate * FURTHER**place for place in places]
        total += ends[end] * sum(math.prod(rates[: depth + 1]) for depth in range(len(rates)))
    return total


def test_plain_decoding_has_masks_behind_its_root() -> None:
    # 0.5, 0.2, 0.064 and 0.016; 0.7, 0.39, 0.18 and 0.063.
    assert chosen(EMPTY_TREE, SHAPE, 99, 99, 0.5) == (MaskGroup(ROOT, 2),)
    assert chosen(EMPTY_TREE, MaskShape(9, 2), 99, 99, 0.5) == (MaskGroup(ROOT, 2),)
    assert chosen(EMPTY_TREE, MaskShape(9, 2), 99, 99, 0.7) == (MaskGroup(ROOT, 3),)


def test_rows_that_are_computed_anyhow_may_promise_less() -> None:
    # The third and, at 0.7, the fourth fit into a pass of four rows and, of a pass of eight, none but the rest.
    assert chosen(EMPTY_TREE, SHAPE, 99, 99, 0.5, multiple=4) == (MaskGroup(ROOT, 3),)
    assert chosen(EMPTY_TREE, MaskShape(9, 2), 99, 99, 0.7, multiple=4) == (MaskGroup(ROOT, 3),)
    assert chosen(EMPTY_TREE, MaskShape(9, 2), 99, 99, 0.7, multiple=8) == (MaskGroup(ROOT, 4),)
    # One node: the pass of four has two more rows, and what makes it one of eight has to be worth it.
    assert chosen(tree((ROOT, 0.98)), SHAPE, 99, 99, 0.45, multiple=4) == (MaskGroup(0, 2),)
    # Four more masks add 0.36, 0.26, 0.22 and 0.15: worth four rows at a tenth each, and not at three tenths.
    two = tree((ROOT, 0.6))
    assert chosen(two, SHAPE, 99, 99, 0.9, price=0.1, multiple=4) == (MaskGroup(0, 3), MaskGroup(ROOT, 3))
    assert chosen(two, SHAPE, 99, 99, 0.9, price=0.3, multiple=4) == (MaskGroup(0, 2),)


def test_nodes_are_verified_that_are_worth_their_rows_beside_the_masks() -> None:
    """Blocks of six rows, the second of which takes half as long as the first."""
    blocks = PassCurve.of_sizes([6, 12], [1.0, 1.5])
    paths = [math.log(share) for share in (0.2, 0.9, 0.05, 0.6, 0.3)]
    # With two masks three nodes fill the block, and the other two are not worth another at one token a pass.
    assert num_worth_verifying(paths, 2, curve=blocks, rate=1.0) == 3
    assert num_worth_verifying(paths, 0, curve=blocks, rate=1.0) == 5
    # At half of that they are not either, and at less than their share they are.
    assert num_worth_verifying(paths, 2, curve=blocks, rate=0.51) == 3
    assert num_worth_verifying(paths, 2, curve=blocks, rate=0.49) == 5
    # Rows of a tenth each: 0.9, 0.6, 0.3 and 0.2 are worth that at one token a pass, and 0.9 alone at seven.
    assert num_worth_verifying(paths, 2, curve=PassCurve.line(0.1), rate=1.0) == 4
    assert num_worth_verifying(paths, 2, curve=PassCurve.line(0.1), rate=7.0) == 1
    assert num_worth_verifying(paths, 2, curve=PassCurve.line(1.0), rate=1.0) == 0
    assert num_worth_verifying([], 2, curve=blocks, rate=1.0) == 0


def test_masks_fill_a_block_of_rows_and_do_not_begin_another_for_little() -> None:
    blocks = PassCurve.of_sizes([6, 12], [1.0, 1.3])
    two = tree((ROOT, 0.6))
    # The six that are offered promise 0.54, 0.39, 0.36, 0.26, 0.22 and 0.15: four of them fill the first block. The
    # other two pay for a second one at one token a pass, and not at two.
    assert choose_groups(two, SHAPE, 99, 99, 0.9, curve=blocks, rate=1.0) == (MaskGroup(0, 3), MaskGroup(ROOT, 3))
    assert choose_groups(two, SHAPE, 99, 99, 0.9, curve=blocks, rate=2.0) == (MaskGroup(0, 2), MaskGroup(ROOT, 2))


def test_rows_and_room_bound_the_masks() -> None:
    two = tree((ROOT, 0.6))
    # At 0.9 behind the node 0.54, 0.39 and 0.22; behind the root 0.36, 0.26 and 0.15.
    assert chosen(two, SHAPE, 4, 99, 0.9) == (MaskGroup(0, 2), MaskGroup(ROOT, 2))
    assert chosen(two, SHAPE, 0, 99, 0.9) == ()
    # With room for four tokens: the root's own, then two masks', and the next round's own.
    assert chosen(two, SHAPE, 99, 4, 0.9) == (MaskGroup(0, 1), MaskGroup(ROOT, 2))
    assert chosen(two, SHAPE, 99, 2, 0.9) == ()


def test_groups_are_chains_in_order() -> None:
    assert mask_parents((MaskGroup(1, 2), MaskGroup(ROOT, 1)), 4) == (1, 4, ROOT)


def test_a_draft_comes_from_the_nearest_masks_of_each_depth() -> None:
    grown = tree((ROOT, 0.6), (0, 0.5), (ROOT, 0.3), (1, 0.5))
    groups = (MaskGroup(1, 2), MaskGroup(ROOT, 4))
    assert masks_for(groups, grown, ROOT) == ([2, 3, 4, 5], [0, 1, 2, 3])
    # One token is known by now that the root's first mask stood for, so its second says what comes next.
    assert masks_for(groups, grown, 0) == ([3, 4, 5], [1, 2, 3])
    assert masks_for(groups, grown, 2) == ([3, 4, 5], [1, 2, 3])
    # The first two depths are those of the end's own; the root's fourth and last is no further than they.
    assert masks_for(groups, grown, 1) == ([0, 1], [0, 1])
    assert masks_for(groups, grown, 3) == ([1], [1])
    assert masks_for((MaskGroup(1, 1), MaskGroup(ROOT, 4)), grown, 1) == ([0, 4], [0, 3])
    assert masks_for((MaskGroup(1, 1),), grown, 2) == ([], [])
    assert masks_for((), EMPTY_TREE, ROOT) == ([], [])


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
