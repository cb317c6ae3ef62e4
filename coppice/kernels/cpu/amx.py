"""Detection of Intel AMX: the processor multiplies tiles of bfloat16, and the system lets this process use them."""

from __future__ import annotations

import ctypes
import sys

import llvmlite.binding

from coppice.kernels.cpu.vector_code import MULTIPLIES_HALVES

# Linux for x86-64: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18


def _request_tiles() -> bool:
    """Ask for tiles, for all threads of this process; false if there are none."""
    features = llvmlite.binding.get_host_cpu_features()
    has_tiles = features.get("amx-tile") and features.get("amx-bf16")
    if not MULTIPLIES_HALVES or not has_tiles or sys.platform != "linux":
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)


MULTIPLIES_TILES = _request_tiles()
