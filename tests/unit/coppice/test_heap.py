"""Memory that a process gives back, and one that has compiled its kernels and makes room for one that reads them."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import signal
import subprocess
import sys
import weakref

import numpy as np
import pytest

from coppice.heap import _clean_library_parts, start_again_if_compiled
from coppice.kernels.cpu import compiler
from coppice.kernels.cpu.compiler import COMPILATIONS, compiled
from coppice.net import rpc
from tests.faults.processes import resident_mib

COMMAND = ["python", "-m", "verifier_svc"]


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands by which the process was replaced."""
    commands: list[list[str]] = []

    def execv(_: str, command: list[str]) -> None:
        commands.append(command[1:])

    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setattr(sys, "orig_argv", COMMAND)
    monkeypatch.setenv("COPPICE_STARTED_AGAIN", "")
    return commands


def test_it_starts_again_once(replaced: list[list[str]]) -> None:
    start_again_if_compiled(2)
    assert replaced == [COMMAND[1:]]
    start_again_if_compiled(2)
    assert len(replaced) == 1


def test_not_where_all_was_on_disk(replaced: list[list[str]]) -> None:
    start_again_if_compiled(0)
    assert not replaced


def test_not_as_a_part_of_a_command(replaced: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "coppice.cli.tied_process", "1", "verifier_svc"])
    start_again_if_compiled(2)
    assert not replaced


def test_what_is_not_kept_on_disk_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def double(values: np.ndarray) -> np.ndarray:
        return 2 * values

    monkeypatch.setattr(compiler, "_cache_directory", lambda _: None)
    before = COMPILATIONS.num_kept
    assert compiled(double)(np.ones(2)).tolist() == [2, 2]
    assert COMPILATIONS.num_kept == before


SMAPS = """\
7f00-7f10 r-xp 00001000 00:1d 11 /lib/libone.so.6
Rss: 40 kB
Anonymous: 0 kB
7f10-7f20 r--p 00002000 00:1d 11 /lib/libone.so.6
Rss: 16 kB
Anonymous: 8 kB
7f20-7f30 rw-p 00003000 00:1d 11 /lib/libone.so.6
Rss: 8 kB
Anonymous: 0 kB
7f30-7f40 r-xp 00000000 00:1d 12 /lib/libtwo.so
Rss: 0 kB
Anonymous: 0 kB
7f40-7f50 r--s 00000000 00:1d 13 /models/weights.safetensors
Rss: 12 kB
Anonymous: 0 kB
7f50-7f60 r-xp 00000000 00:00 0
Rss: 4 kB
Anonymous: 0 kB
7f60-7f70 r--p 00000000 00:1d 14 /lib/with a space.so
Rss: 20 kB
Anonymous: 0 kB
"""


def test_only_parts_of_libraries_that_are_as_on_disk_are_unmapped() -> None:
    assert list(_clean_library_parts(SMAPS.splitlines())) == [(0x7F00, 0x7F10, 40), (0x7F60, 0x7F70, 20)]


CHILD = """
import torch
from tests.faults.processes import resident_mib
from coppice.heap import release_library_pages

layer = torch.nn.Linear(8, 8)
rows = torch.randn(3, 8)
expected, before = layer(rows), resident_mib()
unmapped = release_library_pages() / 2**20
after = resident_mib()
assert unmapped > 20, unmapped
assert before - after > 0.8 * unmapped, (before, after, unmapped)
assert torch.equal(layer(rows), expected)
assert resident_mib() - after < unmapped / 2
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_process_goes_on_without_the_pages_that_importing_read() -> None:
    subprocess.run([sys.executable, "-c", CHILD], check=True, timeout=120)


ARENAS = """
import ctypes, sys, threading
from coppice.heap import limit_arenas

if sys.argv[1] == "limited":
    limit_arenas()
gate = threading.Barrier(8)

def allocate():
    held = [bytes(2000 + place) for place in range(100)]
    gate.wait()

threads = [threading.Thread(target=allocate) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
libc = ctypes.CDLL(None)
libc.fdopen.restype = ctypes.c_void_p
libc.malloc_info(0, ctypes.c_void_p(libc.fdopen(1, b"w")))
libc.fflush(None)
"""


@pytest.mark.skipif(sys.platform != "linux" or not os.confstr("CS_GNU_LIBC_VERSION"), reason="needs glibc")
@pytest.mark.parametrize("kind", ["limited", "free"])
def test_threads_share_a_few_arenas(kind: str) -> None:
    command = [sys.executable, "-c", ARENAS, kind]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert (told.count("<heap nr=") <= 2) == (kind == "limited")


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc's allocator")
def test_a_service_gives_scattered_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    blocks = [libc.malloc(16 * 1024) for _ in range(4000)]
    for block in blocks:
        ctypes.memset(block, 1, 16 * 1024)
    # What lies between is still in use, so that the allocator keeps these pages by itself.
    for block in blocks[::2]:
        libc.free(block)
    fell_by: list[float] = []

    async def serve() -> None:
        before = resident_mib()
        # At most 10 s.
        for _ in range(200):
            await asyncio.sleep(0.05)
            if resident_mib() <= before - 16:
                break
        fell_by.append(before - resident_mib())

    monkeypatch.setattr("coppice.heap._GIVE_BACK_S", 0.1)
    rpc.run(serve)
    for block in blocks[1::2]:
        libc.free(block)
    assert fell_by[0] >= 16


def test_a_service_collects_what_little_garbage_it_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Held:
        """What a cycle holds."""

    freed: list[bool] = []

    async def serve() -> None:
        held = Held()
        held.itself = held  # type: ignore[attr-defined]
        gone = weakref.ref(held)
        # Old enough for only a full collection to find it.
        gc.collect(1)
        gc.collect(1)
        del held
        # At most 10 s.
        for _ in range(200):
            await asyncio.sleep(0.05)
            if gone() is None:
                break
        freed.append(gone() is None)

    monkeypatch.setattr("coppice.heap._GIVE_BACK_S", 0.1)
    rpc.run(serve)
    assert freed == [True]


def test_a_crash_in_c_says_where() -> None:
    script = "import os\nfrom coppice.net import rpc\nasync def serve():\n    os.abort()\nrpc.run(serve)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in done.stderr
    assert "in serve" in done.stderr
