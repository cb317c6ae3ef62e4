"""Keys and values of all layers in few tensors, so that rows of all of them move at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verifier_svc.engine.kv_cache import BLOCK_SIZE, IntArray


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Shape and dtype of a layer's keys and values per token."""

    kv_heads: int
    size: int
    value_size: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of one token's key and value."""
        return self.kv_heads * (self.size + self.value_size) * self.dtype.itemsize


class LayerPools:
    """Keys [layers, blocks, kv_heads, BLOCK_SIZE, size] and values likewise, one pool per layer shape.

    There is one block more than the cache's, for writes that are never read.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._num_blocks = 0
        # Layers seen, kept over `allocate`, which puts those of one shape together.
        self._shapes: dict[int, LayerShape] = {}
        self._pools: list[tuple[Tensor, Tensor]] = []
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def bytes_per_slot(self) -> int:
        """Bytes per token over all layers seen so far."""
        return sum(shape.num_bytes for shape in self._shapes.values())

    @property
    def scratch_slot(self) -> int:
        """A slot of no sequence."""
        return self._num_blocks * BLOCK_SIZE

    def allocate(self, num_blocks: int) -> None:
        """Allocate this many blocks in every layer seen, dropping contents."""
        self._num_blocks = num_blocks
        self._pools, self._layers = [], {}
        for shape in dict.fromkeys(self._shapes.values()):
            self._add([layer for layer, other in self._shapes.items() if other == shape], shape)

    def layer(self, layer: int, shape: LayerShape) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer [blocks + 1, kv_heads, BLOCK_SIZE, size]."""
        if layer not in self._layers:
            self._shapes[layer] = shape
            self._add([layer], shape)
        return self._layers[layer]

    def _add(self, layers: list[int], shape: LayerShape) -> None:
        blocks = len(layers), self._num_blocks + 1, shape.kv_heads, BLOCK_SIZE
        keys, values = (
            torch.empty(*blocks, size, dtype=shape.dtype, device=self._device)
            for size in (shape.size, shape.value_size)
        )
        self._pools.append((keys, values))
        self._layers |= {layer: (keys[index], values[index]) for index, layer in enumerate(layers)}

    def move(self, sources: IntArray, destinations: IntArray) -> None:
        """Move slots of every layer; all are read before any is written."""
        read, written = (torch.from_numpy(slots).to(self._device) for slots in (sources, destinations))
        for pools in self._pools:
            for pool in pools:
                rows = pool[:, read // BLOCK_SIZE, :, read % BLOCK_SIZE]
                pool[:, written // BLOCK_SIZE, :, written % BLOCK_SIZE] = rows
