"""What this process has allocated and not given back, which no warm cache of the allocator can blur."""

from __future__ import annotations

import ctypes
import gc

import pytest

_MIB = 1024 * 1024


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks"),
            *("uordblks", "fordblks", "keepcost"),
        )
    ]


def allocated_mib() -> float:
    """MiB in use of the C heap, without garbage; skips the test where the system does not tell."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):
        pytest.skip("only glibc tells what is allocated")
    mallinfo.restype = _Mallinfo
    gc.collect()
    info = mallinfo()
    return float(info.uordblks + info.hblkhd) / _MIB
