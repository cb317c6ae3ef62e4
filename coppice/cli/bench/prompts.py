"""`coppice bench prompts`: the prompts that the suites cut for themselves, as a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coppice.cli.bench import options as opt


def prompts(
    out: Annotated[Path, typer.Option(help="The file to write, JSON lines.")],
    num_prompts: opt.NumPrompts = 20,
    seed: opt.Seed = 0,
    max_chars: Annotated[
        int, typer.Option(min=100, help="Most characters of a prompt; the fewest are two thirds.")
    ] = 900,
) -> None:
    """Write code prompts cut from held-out files of the standard library."""
    from coppice.lab.bench.prompts import write_prompts

    chosen = opt.choose_prompts(None, num_prompts, seed, max_chars)
    write_prompts(chosen, out)
    typer.echo(f"wrote {len(chosen)} prompts to {out}")
