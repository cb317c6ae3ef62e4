"""`python -m tests.fuzz`: strict mode against plain decoding, at random and in full. `make fuzz` runs it."""

from __future__ import annotations

import logging
import tempfile
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from coppice.kernels.cpu.openmp import set_spin_count

TINY_VOCAB, TINY_CONTEXT = 97, 420
# Tiny checkpoints: their contexts, and rope parameters. Prompts and outputs of the fuzz lie around the length at which
# factors change, and around the trained length.
TINY_TARGETS: dict[str, tuple[int, dict[str, Any]]] = {
    "default": (TINY_CONTEXT, {"rope_type": "default", "rope_theta": 10_000.0}),
    "longrope": (
        TINY_CONTEXT,
        {
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "original_max_position_embeddings": 120,
            "short_factor": [1.0, 1.02, 1.04, 1.06],
            "long_factor": [1.5, 2.5, 3.5, 4.5],
        },
    ),
    "dynamic": (200, {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}),
}


def main(
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to compare, at least.")] = 20_000,
    changes: Annotated[int, typer.Option(min=1, help="Joins, leaves, cancels and preemptions, at least.")] = 1000,
    cases: Annotated[int, typer.Option(min=9, help="Different requests, each decoded alone first.")] = 45,
    seed: Annotated[int, typer.Option(min=0, help="The same seed does the same again.")] = 0,
    target: Annotated[Path | None, typer.Option(help="A checkpoint, e.g. models/target. Default: tiny ones.")] = None,
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
        checkpoints = [] if target is None else [target]
        if target is None:
            for rope_type, (context, rope) in TINY_TARGETS.items():
                checkpoints.append(Path(directory) / rope_type)
                write_tiny_llama(
                    checkpoints[-1], vocab_size=TINY_VOCAB, max_context_tokens=context, rope_parameters=rope
                )
        counts: Counter[str] = Counter()
        for checkpoint in checkpoints:
            typer.echo(f"target {checkpoint.name}")
            shares = (-(-number // len(checkpoints)) for number in (tokens, changes))
            counts += fuzz(FuzzPlan(checkpoint, *shares, cases, seed, threads), typer.echo)
    for name, count in counts.items():
        typer.echo(f"{count:>9,} {name}")
    typer.echo(f"every token and every bit as alone, and every block came back (seed {seed})")


if __name__ == "__main__":
    typer.run(main)
