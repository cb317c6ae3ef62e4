"""`coppice bench report`: pages of the committed results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    results: Annotated[
        Path, typer.Option(exists=True, file_okay=False, help="Directory with JSON files of results.")
    ] = Path("results"),
    out: Annotated[Path, typer.Option(help="Directory for the pages.")] = Path("docs/results"),
) -> None:
    """Write a Markdown page for each JSON file of results: machine, versions, command, ratios and rows."""
    from coppice.lab.bench.results_pages import write_pages

    try:
        written = write_pages(results, out)
    except (OSError, ValueError) as error:
        typer.echo(f"coppice: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(f"wrote {len(written)} files to {out}")
