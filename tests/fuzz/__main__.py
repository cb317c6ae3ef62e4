"""`python -m tests.fuzz`: strict mode against plain decoding, at random and in full. `make fuzz` runs it."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from coppice.openmp import set_spin_count

TINY_VOCAB, TINY_CONTEXT = 97, 420


def main(
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to compare, at least.")] = 20_000,
    changes: Annotated[int, typer.Option(min=1, help="Joins, leaves, cancels and preemptions, at least.")] = 1000,
    cases: Annotated[int, typer.Option(min=9, help="Different requests, each decoded alone first.")] = 45,
    seed: Annotated[int, typer.Option(min=0, help="The same seed does the same again.")] = 0,
    target: Annotated[Path | None, typer.Option(help="A checkpoint, e.g. models/target. Default: a tiny one.")] = None,
    threads: Annotated[int, typer.Option(min=0, help="Threads; 0 as a server has them by default.")] = 0,
) -> None:
    """Compare every token, and the bits of the logits behind it, with plain decoding alone; print what happened."""
    set_spin_count()
    # Here, because torch reads that setting when it is imported.
    from transformers.utils import logging as transformers_logging

    from tests.fuzz.exactness import FuzzPlan, fuzz
    from tests.tiny_checkpoint import write_tiny_llama

    logging.basicConfig(level=logging.ERROR)
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as directory:
        if target is None:
            write_tiny_llama(Path(directory), vocab_size=TINY_VOCAB, max_context_tokens=TINY_CONTEXT)
        plan = FuzzPlan(target or Path(directory), tokens, changes, cases, seed, threads)
        counts = fuzz(plan, typer.echo)
    for name, count in counts.items():
        typer.echo(f"{count:>9,} {name}")
    typer.echo(f"every token and every bit as alone, and every block came back (seed {seed})")


if __name__ == "__main__":
    typer.run(main)
