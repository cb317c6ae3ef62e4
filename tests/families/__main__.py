"""`python -m tests.families`: every family of models through the fuzz of strict mode. `make families` runs it."""

from __future__ import annotations

import logging
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from coppice.kernels.cpu.openmp import set_spin_count


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Families; all by default.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to compare in each, at least.")] = 1000,
    changes: Annotated[int, typer.Option(min=1, help="Joins, leaves, cancels and preemptions in each, at least.")] = 80,
    cases: Annotated[int, typer.Option(min=9, help="Different requests, each decoded alone first.")] = 9,
    seed: Annotated[int, typer.Option(min=0, help="The same seed does the same again.")] = 0,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    additions: Annotated[bool, typer.Option(help="With a random early head and a random adapter.")] = False,
) -> None:
    """Compare every token and the bits of its logits with plain decoding alone, and that with transformers."""
    set_spin_count()
    # Here, because torch reads that setting when it is imported.
    from transformers.utils import logging as transformers_logging

    from tests.families.checkpoints import FAMILIES, plan_for, write_additions
    from tests.fuzz.exactness import MASKS, PRUNED, fuzz

    logging.basicConfig(level=logging.ERROR)
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    total: Counter[str] = Counter()
    for name in names or FAMILIES:
        started_s = time.monotonic()
        with tempfile.TemporaryDirectory() as directory:
            model = Path(directory) / "model"
            FAMILIES[name].write(model)
            plan = plan_for(FAMILIES[name], model, tokens, changes, cases, seed, dtype)
            if additions:
                head, adapter = write_additions(model, Path(directory))
                plan = replace(plan, early_head=head, space_adapter=adapter)
            counts = fuzz(plan)
        total += counts
        typer.echo(
            f"{name:16} {counts['tokens']:6,} tokens as alone, {counts['accepted']:5,} accepted nodes, "
            f"{counts['recomputed tokens']:6,} tokens recomputed, {counts['prefix hits']:3} prefix hits, "
            f"{counts[PRUNED]:5,} pruned nodes, {counts[MASKS]:4} masks, "
            f"{counts['tokens that transformers says, too']:4} as transformers, {time.monotonic() - started_s:5.1f} s"
        )
    typer.echo(f"{total['tokens']:,} tokens in {len(names or FAMILIES)} families, bit for bit (seed {seed})")


if __name__ == "__main__":
    typer.run(main)
