"""Tree attention on GPUs: three Triton kernels over the paged cache in place. Import fails without Triton.

A row's result does not depend on the batch, see triton_kernels.py; it does depend on the tree, whose rows have other
places than the same tokens in plain decoding. Strict mode therefore does not use this kernel.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.errors import TritonError

from verifier_svc.engine.kv_cache import BLOCK_SIZE, IntArray
from verifier_svc.engine.pass_plan import PassPlan
from verifier_svc.kernels.base import AttentionRule, KernelLimitError
from verifier_svc.kernels.triton.kernels import attend_items, join_parts, store_rows
from verifier_svc.kernels.triton.layer_pools import LayerPools, LayerShape
from verifier_svc.kernels.triton.plan import (
    ITEM_FIELDS,
    SPLIT,
    TILE_FIELDS,
    TILE_ROWS,
    Layout,
    PassBuffers,
    PassTensors,
)

# Exceptions when compiling or launching a kernel: of Triton, the driver, the launcher's compiler and the kernel cache.
TRITON_FAILURES = (TritonError, RuntimeError, OSError, subprocess.SubprocessError)

# Upper bound of query heads of one key head in a tile; larger groups are read in parts.
_MOST_HEADS = 8
# Smallest matrix for the tensor cores.
_LEAST_TILE = 16
# Larger heads exceed shared memory.
_MOST_SIZE = 256
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Upper bound of programs per head.
_PROGRAMS = 64


class TritonKernel:
    """Keys and values in blocks [kv_heads, BLOCK_SIZE, size], read in place."""

    def __init__(self, device: torch.device, programs: int = _PROGRAMS) -> None:
        self.device = device
        self._programs = programs
        self._pools = LayerPools(device)
        self._buffers: dict[Layout, PassBuffers] = {}
        self._pass: PassTensors | None = None
        self._has_gaps = False

    @property
    def bytes_per_slot(self) -> int:
        """Bytes per token over all layers seen so far."""
        return self._pools.bytes_per_slot

    def allocate(self, num_blocks: int) -> None:
        """Allocate this many blocks, dropping contents."""
        self._pools.allocate(num_blocks)

    def layout(self, plan: PassPlan) -> Layout:
        """Passes of one layout use the same addresses."""
        return Layout.of(plan)

    def begin(self, plan: PassPlan, sources: IntArray, destinations: IntArray) -> None:
        """Move slots and begin a pass."""
        if len(sources):
            self._pools.move(sources, destinations)
        layout = self.layout(plan)
        if layout not in self._buffers:
            self._buffers[layout] = PassBuffers(layout, self.device)
        buffers = self._buffers[layout]
        buffers.load(plan, self._pools.scratch_slot)
        self._pass = buffers.tensors
        self._has_gaps = any(segment.places is not None for segment in plan.segments)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        """See `AttentionKernel`; in single and half precision, for heads of at most 256, without chunks and slopes."""
        if rule.chunk is not None or rule.slopes is not None:
            raise KernelLimitError("the Triton kernel supports neither chunks nor slopes")
        if rule.sliding_window is not None and self._has_gaps:
            # A key's position is computed from its row number.
            raise KernelLimitError("the Triton kernel does not support sliding windows in pruned passes")
        shape = HeadShape(query.shape[0], key.shape[0], query.shape[-1], value.shape[-1])
        if query.dtype not in _DTYPES or key.dtype != query.dtype or value.dtype != query.dtype:
            raise KernelLimitError(f"the Triton kernel does not know {query.dtype} queries beside {key.dtype} keys")
        if max(shape.size, shape.value_size) > _MOST_SIZE:
            raise KernelLimitError(f"the Triton kernel knows heads of at most {_MOST_SIZE} numbers")
        query, key, value = (_with_adjacent_columns(tensor) for tensor in (query, key, value))
        kept = LayerShape(shape.kv_heads, shape.size, shape.value_size, key.dtype)
        keys, values = self._pools.layer(layer, kept)
        self._store(shape, key, value, keys, values)
        part_sums, part_weights = self._attend_parts(shape, query, keys, values, rule)
        return self._join(shape, query, part_sums, part_weights, rule.sinks)

    @property
    def _rows(self) -> PassTensors:
        assert self._pass is not None, "attention outside a pass"
        return self._pass

    def _store(self, shape: HeadShape, key: Tensor, value: Tensor, keys: Tensor, values: Tensor) -> None:
        num_rows = key.shape[1]
        store_rows[(-(-num_rows // TILE_ROWS), shape.kv_heads)](
            key,
            value,
            keys,
            values,
            self._rows.write_slots,
            *key.stride()[:2],
            *value.stride()[:2],
            num_rows,
            KEY_HEADS=shape.kv_heads,
            ROWS=TILE_ROWS,
            **shape.columns,
            BLOCK=BLOCK_SIZE,
            num_warps=1,
            # Computes nothing, but Triton 3.9 warns where this is left open.
            enable_fp_fusion=False,
        )

    def _attend_parts(
        self, shape: HeadShape, query: Tensor, keys: Tensor, values: Tensor, rule: AttentionRule
    ) -> tuple[Tensor, Tensor]:
        """Weighted sums of values, and the highest score and sum of weights, for every item and head."""
        rows = self._rows
        num_items = rows.items.shape[0]
        places = num_items * shape.chunks * shape.tile
        part_sums = torch.empty(places, shape.value_size, dtype=torch.float32, device=query.device)
        part_weights = torch.empty(places, 2, dtype=torch.float32, device=query.device)
        attend_items[(min(self._programs, num_items), shape.chunks)](
            query,
            keys,
            values,
            part_sums,
            part_weights,
            rows.num_items,
            rows.items,
            rows.positions,
            rows.bits,
            rows.tables,
            rule.scale,
            rule.softcap or 0.0,
            rule.sliding_window or 0,
            *query.stride()[:2],
            rows.bits.shape[1],
            FIELDS=ITEM_FIELDS,
            KEY_HEADS=shape.kv_heads,
            **shape.tiles,
            **shape.columns,
            BLOCK=BLOCK_SIZE,
            SPLIT=SPLIT,
            HAS_SOFTCAP=rule.softcap is not None,
            HAS_WINDOW=rule.sliding_window is not None,
            PRECISION="ieee",
            num_warps=4,
            num_stages=2,
            enable_fp_fusion=False,
        )
        return part_sums, part_weights

    def _join(
        self, shape: HeadShape, query: Tensor, part_sums: Tensor, part_weights: Tensor, sinks: Tensor | None
    ) -> Tensor:
        rows = self._rows
        num_rows = query.shape[1]
        output = query.new_empty(num_rows, shape.heads, shape.value_size)
        join_parts[(min(self._programs, num_rows), shape.chunks)](
            part_sums,
            part_weights,
            rows.num_tiles,
            rows.tiles,
            query if sinks is None else sinks,
            output,
            FIELDS=TILE_FIELDS,
            **shape.tiles,
            VALUE_SIZE=shape.value_size,
            VALUE_WIDTH=shape.columns["VALUE_WIDTH"],
            HAS_SINKS=sinks is not None,
            num_warps=4,
            # Same rounding as in `attend_items`, which joins parts too.
            enable_fp_fusion=False,
        )
        return output


@dataclass(frozen=True, slots=True)
class HeadShape:
    """A layer's heads and their arrangement in tiles."""

    heads: int
    kv_heads: int
    size: int
    value_size: int

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.heads // self.kv_heads

    @property
    def heads_per_tile(self) -> int:
        """Query heads per tile, a power of two."""
        return min(_MOST_HEADS, _power_of_two(self.group))

    @property
    def tile(self) -> int:
        """Places of a tile."""
        return max(_LEAST_TILE, TILE_ROWS * self.heads_per_tile)

    @property
    def chunks(self) -> int:
        """Tiles that together hold all heads."""
        return self.kv_heads * -(-self.group // self.heads_per_tile)

    @property
    def tiles(self) -> dict[str, int]:
        """Kernel arguments for heads."""
        return {"GROUP": self.group, "HEADS": self.heads_per_tile, "TILE": self.tile}

    @property
    def columns(self) -> dict[str, int]:
        """Kernel arguments for keys and values. Widths are reserved by tiles."""
        widths = (max(_LEAST_TILE, _power_of_two(size)) for size in (self.size, self.value_size))
        return {
            "SIZE": self.size,
            "VALUE_SIZE": self.value_size,
            **dict(zip(("WIDTH", "VALUE_WIDTH"), widths, strict=True)),
        }


def _with_adjacent_columns(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _power_of_two(number: int) -> int:
    """Smallest power of two of at least `number`."""
    return 1 << (number - 1).bit_length()
