"""What the Triton kernels are told of a pass, read back the slow way."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from coppice.core.tree import EMPTY_TREE, TokenTree
from tests.unit.verifier_svc.oracles import random_tree
from verifier_svc.engine.kv_cache import BLOCK_SIZE, KVCache, SequenceCache
from verifier_svc.engine.pass_plan import PassPlan, SequenceRows, plan_pass, visibility
from verifier_svc.kernels.triton.layer_pools import LayerPools, LayerShape
from verifier_svc.kernels.triton.plan import MOST_PARTS, SPLIT, TILE_ROWS, Layout, PassBuffers, PassTensors

SCRATCH = 9999


def new_plan(*shares: tuple[int, int, TokenTree], row_multiple: int = 1) -> PassPlan:
    """A pass over sequences with so many cached tokens, pending rows and a tree."""
    cache = KVCache(8192)
    rows = []
    for context, pending, tree in shares:
        sequence = SequenceCache(cache, 1 << 17)
        sequence.reserve(context)
        sequence.length = context
        rows.append(SequenceRows(sequence, [1] * pending, tree))
    return plan_pass(rows, row_multiple=row_multiple)


def described(plan: PassPlan) -> PassTensors:
    buffers = PassBuffers(Layout.of(plan), torch.device("cpu"))
    # What the last pass has left must not matter.
    buffers.load(new_plan(*[(300, 1, random_tree(np.random.default_rng(0), 99, 60))]), SCRATCH)
    buffers.load(plan, SCRATCH)
    return buffers.tensors


def keys_of_rows(plan: PassPlan, rows: PassTensors) -> dict[int, list[int]]:
    """The slots that each row sees, part by part, from tiles, items, bits and tables alone."""
    seen: dict[int, list[int]] = {}
    for first, num_rows, first_item, num_items in rows.tiles[: int(rows.num_tiles)].tolist():
        for row in range(first, first + num_rows):
            assert row not in seen
            seen[row] = []
            for item in rows.items[first_item : first_item + num_items].tolist():
                assert item[:2] == [first, num_rows]
                _, _, segment_row, context, pending, table, first_key, last_key = item
                assert first_key % SPLIT == 0
                for key in range(first_key, last_key):
                    node = key - context - pending
                    bits = int(rows.bits[row, node // 32]) & 0xFFFFFFFF if node >= 0 else 0
                    if key < context + min(row - segment_row + 1, pending) or bits >> (node % 32) & 1:
                        seen[row].append(int(rows.tables[table + key // BLOCK_SIZE]) * BLOCK_SIZE + key % BLOCK_SIZE)
    return seen


@pytest.mark.parametrize("seed", range(3))
def test_every_row_is_told_of_the_keys_that_it_sees(seed: int) -> None:
    generator = np.random.default_rng(seed)
    trees = [random_tree(generator, 1000, int(size)) for size in (70, 1, 33)]
    shares = [(int(generator.integers(0, 700)), int(generator.integers(1, 20)), tree) for tree in trees]
    plan = new_plan(*shares, (5, 17, EMPTY_TREE), row_multiple=16)
    rows = described(plan)
    expected: dict[int, list[int]] = {row: [] for row in range(plan.num_rows, len(plan.token_ids))}
    for segment in plan.segments:
        slots = segment.slots(0, segment.num_context + segment.stop - segment.start).tolist()
        for row, sees in enumerate(visibility(segment.num_pending, segment.parents)):
            own = [segment.num_context + int(index) for index in np.flatnonzero(sees)]
            expected[segment.start + row] = [slots[key] for key in [*range(segment.num_context), *own]]
    assert keys_of_rows(plan, rows) == expected
    assert rows.write_slots[: plan.num_rows].tolist() == plan.write_slots.tolist()
    assert set(rows.write_slots[plan.num_rows :].tolist()) == {SCRATCH}
    assert rows.positions[: len(plan.positions)].tolist() == plan.positions.tolist()


def test_contexts_are_cut_unless_that_makes_too_many_parts() -> None:
    few, many = (new_plan(*[(4 * SPLIT, 1, EMPTY_TREE)] * count) for count in (MOST_PARTS // 5, MOST_PARTS // 5 + 1))
    assert int(described(few).num_items) == MOST_PARTS // 5 * 5
    rows = described(many)
    assert int(rows.num_items) == MOST_PARTS // 5 + 1
    assert {tuple(keys) for keys in rows.items[: int(rows.num_items), 6:].tolist()} == {(0, 4 * SPLIT + 1)}


def test_layouts_are_few() -> None:
    tree = random_tree(np.random.default_rng(0), 1000, 65)
    assert (
        Layout.of(new_plan((10, 1, EMPTY_TREE))) == Layout(8, 256, 2, 4096) == Layout.of(new_plan((700, 8, EMPTY_TREE)))
    )
    assert Layout.of(new_plan((10, 1, tree))) == Layout(128, 256, 4, 4096)
    assert Layout.of(new_plan((10, 9, EMPTY_TREE), row_multiple=96)) == Layout(128, 256, 2, 4096)
    assert Layout.of(new_plan(*[(BLOCK_SIZE * 1500, 1, EMPTY_TREE)] * 3, row_multiple=8)).table == 8192
    assert Layout.of(new_plan((0, 256 * TILE_ROWS, EMPTY_TREE))) == Layout(2048, 256, 2, 4096)
    assert Layout.of(new_plan((0, 256 * TILE_ROWS, EMPTY_TREE), (0, 1, EMPTY_TREE))).items == 512


def test_rows_of_all_layers_move_at_once() -> None:
    shape, other = LayerShape(2, 3, 5, torch.float32), LayerShape(1, 4, 4, torch.float16)
    pools = LayerPools(torch.device("cpu"))
    for num_blocks in (1, 2):  # from the second time on, layers of one shape lie together
        pools.allocate(num_blocks)
        layers = [pools.layer(number, kept) for number, kept in enumerate((shape, other, shape))]
    assert pools.bytes_per_slot == 2 * 2 * (3 + 5) * 4 + (4 + 4) * 2
    assert pools.scratch_slot == 2 * BLOCK_SIZE
    assert layers[0][0].untyped_storage().data_ptr() == layers[2][0].untyped_storage().data_ptr()
    flat = [tensor.normal_().transpose(1, 2).reshape(3 * BLOCK_SIZE, -1).clone() for pair in layers for tensor in pair]
    # A chain, in which one row goes where another comes from.
    sources, destinations = np.array([5, 70, 71]), np.array([3, 5, 70])
    pools.move(sources, destinations)
    for before, tensor in zip(flat, (tensor for pair in layers for tensor in pair), strict=True):
        expected = before.clone()
        expected[destinations] = before[sources]
        assert torch.equal(tensor.transpose(1, 2).reshape(3 * BLOCK_SIZE, -1), expected)
