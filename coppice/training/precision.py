"""The number format that training computes in."""

from __future__ import annotations

import torch


def training_dtype(device_type: str = "cpu") -> torch.dtype:
    """bfloat16 where the processor multiplies it, float32 where that would be emulated, four to five times slower.

    So a run is a function of its settings, its seed and the kind of processor.
    """
    if device_type != "cpu" or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported():
        return torch.bfloat16
    return torch.float32
