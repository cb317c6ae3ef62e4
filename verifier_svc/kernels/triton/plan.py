"""A pass as arrays for the Triton kernels: one array on the host, copied to the device at once.

Arrays have a few sizes only (`Layout`), each with a fixed place on the device: a captured pass reads the next pass of
the same layout from the same addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from coppice.core.tree import ROOT
from verifier_svc.engine.kv_cache import BLOCK_SIZE
from verifier_svc.engine.pass_plan import PassPlan, Segment

# Rows of a segment per tile, each with several query heads. A constant: see triton_kernels.py.
TILE_ROWS = 8
# Contexts are cut at multiples of this many keys, for every reader.
SPLIT = 4 * BLOCK_SIZE
# Parts per key head that keep a GPU busy; contexts stay whole if there would be more.
MOST_PARTS = 256
# Fields of an item: first row, rows, segment's first row, cached tokens, pending rows, start of its block table, first
# key, and the one after the last.
ITEM_FIELDS = 8
# Fields of a tile: first row, rows, first item, items.
TILE_FIELDS = 4

_LEAST_ROWS = 8
_LEAST_WORDS = 2
_LEAST_TABLE = 4096
# 16 bytes, the device's preferred alignment.
_ALIGNMENT = 4
_BITS = 32

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of a pass's arrays, powers of two: rows, items, words of a row's ancestor bits, entries of block tables.

    Passes of up to `MOST_PARTS` rows have room for as many items, since there are no more tiles than rows.
    """

    rows: int
    items: int
    words: int
    table: int

    @classmethod
    def of(cls, plan: PassPlan) -> Layout:
        """Smallest layout that holds a pass."""
        most_nodes = max((_num_places(segment) - segment.num_pending for segment in plan.segments), default=0)
        table = sum(len(segment.table) for segment in plan.segments)
        num_tiles = sum(len(_tiles(segment)) for segment in plan.segments)
        return cls(
            _at_least(_LEAST_ROWS, len(plan.token_ids)),
            _at_least(MOST_PARTS, num_tiles),
            _at_least(_LEAST_WORDS, -(-most_nodes // _BITS)),
            _at_least(_LEAST_TABLE, table),
        )

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the arrays, in the order of `PassArrays`."""
        rows = self.rows
        tiles, items = (rows, TILE_FIELDS), (self.items, ITEM_FIELDS)
        return (1,), (1,), (rows,), (rows,), tiles, items, (rows, self.words), (self.table,)


class PassArrays(NamedTuple):
    """Views of one flat array. `bits` are a node's ancestors and itself, by index."""

    num_tiles: Int32Array
    num_items: Int32Array
    write_slots: Int32Array
    positions: Int32Array
    tiles: Int32Array
    items: Int32Array
    bits: Int32Array
    tables: Int32Array


class PassTensors(NamedTuple):
    """`PassArrays` on the device."""

    num_tiles: Tensor
    num_items: Tensor
    write_slots: Tensor
    positions: Tensor
    tiles: Tensor
    items: Tensor
    bits: Tensor
    tables: Tensor


class PassBuffers:
    """Buffers of one layout on the host and on the device."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        sizes = [_aligned(int(np.prod(shape))) for shape in layout.shapes]
        is_cuda = device.type == "cuda"
        self._host = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=is_cuda)
        self._device = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self._copied = torch.cuda.Event() if is_cuda else None
        self._arrays = PassArrays(*(view.numpy() for view in _views(self._host, layout, sizes)))
        self.tensors = PassTensors(*_views(self._device, layout, sizes))

    def load(self, plan: PassPlan, scratch_slot: int) -> None:
        """Copy a pass to the device; rows of padding are written to `scratch_slot`."""
        if self._copied is not None:
            # The last copy may still be running: a pass without logits is not awaited.
            self._copied.synchronize()
        fill(plan, self._arrays, scratch_slot)
        self._device.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()


def fill(plan: PassPlan, arrays: PassArrays, scratch_slot: int) -> None:
    """Fill the arrays for a pass. Rows of padding are in tiles without items."""
    arrays.write_slots.fill(scratch_slot)
    arrays.write_slots[: plan.num_rows] = plan.write_slots
    arrays.positions[: len(plan.positions)] = plan.positions
    arrays.bits[: plan.num_rows] = 0
    is_cut = sum(_num_cuts(segment, first) for segment in plan.segments for first in _tiles(segment)) <= MOST_PARTS
    tiles: list[tuple[int, ...]] = []
    items: list[tuple[int, ...]] = []
    table_start = 0
    for segment in plan.segments:
        table_stop = table_start + len(segment.table)
        arrays.tables[table_start:table_stop] = segment.table
        shared = segment.start, segment.num_context, segment.num_pending, table_start
        for first in _tiles(segment):
            num_rows = min(TILE_ROWS, segment.stop - first)
            parts = _cuts(_last_key(segment, first), is_cut)
            tiles.append((first, num_rows, len(items), len(parts)))
            items += [(first, num_rows, *shared, *part) for part in parts]
        if segment.parents:
            nodes = (segment.row_places[segment.num_pending :] - segment.num_pending).tolist()
            bits = ancestor_bits(segment.parents, nodes, arrays.bits.shape[1])
            arrays.bits[segment.start + segment.num_pending : segment.stop] = bits
        table_start = table_stop
    end = len(plan.token_ids)
    tiles += [(row, min(TILE_ROWS, end - row), 0, 0) for row in range(plan.num_rows, end, TILE_ROWS)]
    arrays.tiles[: len(tiles)] = np.array(tiles, np.int32).reshape(-1, TILE_FIELDS)
    arrays.items[: len(items)] = np.array(items, np.int32).reshape(-1, ITEM_FIELDS)
    arrays.num_tiles[0], arrays.num_items[0] = len(tiles), len(items)


def ancestor_bits(parents: tuple[int, ...], nodes: Sequence[int], words: int) -> Int32Array:
    """Bits of each node's ancestors and itself [nodes, words], lowest first.

    A node's bit is its entry in `nodes`, which differs from its index after pruning.
    """
    paths: list[int] = []
    for node, parent in zip(nodes, parents, strict=True):
        paths.append((paths[parent] if parent != ROOT else 0) | 1 << node)
    joined = b"".join(path.to_bytes(words * _BITS // 8, "little") for path in paths)
    bits: Int32Array = np.frombuffer(joined, "<i4").reshape(-1, words)
    return bits


def _num_places(segment: Segment) -> int:
    """Places after the context, up to the last row's."""
    return segment.num_pending + len(segment.parents) if segment.places is None else int(segment.places[-1]) + 1


def _tiles(segment: Segment) -> range:
    """First rows of a segment's tiles."""
    return range(segment.start, segment.stop, TILE_ROWS)


def _last_key(segment: Segment, first: int) -> int:
    """End of the keys that a tile may see, as a place in the sequence."""
    last = min(first + TILE_ROWS, segment.stop) - segment.start
    return segment.num_context + (last if segment.places is None else int(segment.places[last - 1]) + 1)


def _num_cuts(segment: Segment, first: int) -> int:
    return -(-_last_key(segment, first) // SPLIT)


def _cuts(last_key: int, is_cut: bool) -> list[tuple[int, int]]:
    """Parts of a tile's context that are read in parallel."""
    if not is_cut:
        return [(0, last_key)]
    return [(start, min(start + SPLIT, last_key)) for start in range(0, last_key, SPLIT)]


def _views(flat: Tensor, layout: Layout, sizes: list[int]) -> list[Tensor]:
    """Parts of a flat array in the shapes of a layout."""
    shapes = layout.shapes
    return [part[: int(np.prod(shape))].view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]


def _at_least(least: int, number: int) -> int:
    """Smallest power of two of at least both; `least` is one itself."""
    return max(least, 1 << max(0, number - 1).bit_length())


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
