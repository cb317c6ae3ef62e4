"""Cache of compiled grammars, bounded in bytes."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from coppice.core.errors import CoppiceError
from coppice.core.grammar import Grammar

if TYPE_CHECKING:
    from verifier_svc.grammar.matcher import CompiledGrammar

MAX_CACHE_BYTES = 64 << 20


class GrammarCache:
    """Compiled grammars and compilation errors, so that invalid ones are not compiled twice. Thread-safe.

    Above `max_bytes`, least recently used entries are evicted.
    """

    def __init__(self, max_bytes: int = MAX_CACHE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        # Least recently used first, with sizes in bytes.
        self._entries: OrderedDict[Grammar, tuple[CompiledGrammar | CoppiceError, int]] = OrderedDict()
        # Memory of entries, texts included; estimated if not measured.
        self.num_bytes = 0

    def find(self, grammar: Grammar) -> CompiledGrammar | CoppiceError | None:
        """The cached result for a grammar; None if not cached."""
        with self._lock:
            entry = self._entries.get(grammar)
            if entry is None:
                return None
            self._entries.move_to_end(grammar)
            return entry[0]

    def put(self, grammar: Grammar, result: CompiledGrammar | CoppiceError) -> bool:
        """Cache a result; returns whether entries were dropped."""
        size = sys.getsizeof(grammar.text)
        size += len(str(result)) if isinstance(result, CoppiceError) else result.num_bytes
        forgotten = []
        with self._lock:
            forgotten.append(self._entries.pop(grammar, None))
            self._entries[grammar] = (result, size)
            self.num_bytes += size - (forgotten[0][1] if forgotten[0] is not None else 0)
            while self.num_bytes > self._max_bytes:
                _, oldest = self._entries.popitem(last=False)
                self.num_bytes -= oldest[1]
                forgotten.append(oldest)
        # Freed here, outside the lock.
        return any(entry is not None for entry in forgotten)


def allocated_bytes() -> int | None:
    """Bytes allocated from the C allocator, by libraries but not by Python; None if unknown."""
    count = getattr(ctypes.CDLL(None), "mallinfo2", None) if sys.platform == "linux" else None
    if count is None:
        return None
    count.restype = _MallocInfo
    info = count()
    return int(info.uordblks) + int(info.hblkhd)


class _MallocInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    )
