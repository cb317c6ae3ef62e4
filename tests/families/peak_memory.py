"""`python -m tests.families.peak_memory DIRECTORY`: peak memory of a pass with a tree.

Allocations of more than a few pages have to come from the system and go back to it at once, or the peak of a process
says nothing about a pass: `measured` starts a process with glibc's settings for that. Linux only.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from coppice.core.tree import ROOT, TokenTree, chain

CONTEXT = 256
NODES = 32
_RUNS = 3
_MIB = 2**20
# Returned to the system when freed, bytes.
_MAPPED_FROM = 64 * 1024


def bushy(num_nodes: int, seed: int = 0) -> TokenTree:
    """A random tree."""
    draw = random.Random(seed)
    parents = [draw.randrange(ROOT, node) if node else ROOT for node in range(num_nodes)]
    return TokenTree(tuple(range(num_nodes)), tuple(parents), (-1.0,) * num_nodes)


def measured(directory: Path, dtype: str) -> dict[str, float]:
    """Figures of `main`, from a process of its own."""
    command = [sys.executable, "-m", "tests.families.peak_memory", str(directory), "--dtype", dtype]
    settings = {"MALLOC_MMAP_THRESHOLD_": str(_MAPPED_FROM), "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_TOP_PAD_": "0"}
    child = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, **settings})
    found: dict[str, float] = json.loads(child.stdout)
    return found


def peak_bytes() -> int:
    """Largest resident memory of this process since `forget_peak`."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    """Let the peak begin at the memory that is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def bytes_of_stash(target: Any) -> int:
    """Bytes of rows that the last pass left for a commit, over all recurrences."""
    total = 0
    for layer in target.recurrent.layers:
        for recurrence in layer.recurrences:
            kept = recurrence._inputs
            total += kept.nbytes if hasattr(kept, "nbytes") else sum(getattr(part, "nbytes", 0) for part in kept)
    return total


def main(directory: Path, dtype: Annotated[str, typer.Option()] = "float32") -> None:
    """Print a line of JSON, in MiB: what a pass of a 32-node tree takes above one node, one layer's states of the
    tree, and the stash of the tree's rows.
    """
    from verifier_svc.config import VerifierConfig
    from verifier_svc.engine.kv_cache import SequenceCache
    from verifier_svc.engine.pass_plan import SequenceRows
    from verifier_svc.model.loading import load_probed_target

    settings: dict[str, Any] = {"model": str(directory), "dtype": dtype}
    target, _ = load_probed_target(VerifierConfig(**settings, threads=1, exactness="strict"))
    assert target.recurrent is not None
    cache = SequenceCache(target.cache, 2 * CONTEXT)
    target.forward(target.plan([SequenceRows(cache, list(range(CONTEXT)), wants_logits=False)]))
    cache.keep(range(CONTEXT))

    def peak_of(tree: TokenTree) -> int:
        # The first pass compiles, and makes what later ones keep.
        for _ in range(_RUNS):
            target.forward(target.plan([SequenceRows(cache, [1], tree)]))
        forget_peak()
        target.forward(target.plan([SequenceRows(cache, [1], tree)]))
        return peak_bytes()

    tree = bushy(NODES)
    peaks = [(peak_of(chain([1])), peak_of(tree)) for _ in range(_RUNS)]
    largest_layer = max(sum(one.bytes_per_state for one in layer.recurrences) for layer in target.recurrent.layers)
    figures = {
        "tree_above_node": max(of_tree - of_node for of_node, of_tree in peaks),
        "states_of_one_layer": NODES * largest_layer,
        "stash": bytes_of_stash(target),
    }
    typer.echo(json.dumps({name: round(number / _MIB, 2) for name, number in figures.items()}))


if __name__ == "__main__":
    typer.run(main)
