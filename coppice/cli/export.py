"""`coppice export`: models in the formats of others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coppice.cli.errors import of_file
from coppice.cli.options import here, writable

app = typer.Typer(help="Write a model in the format of another engine.", no_args_is_help=True)


@app.callback()
def _several() -> None:
    """Keeps the command's name, though there is one alone."""


@app.command()
def gguf(
    target: Annotated[str, typer.Option(metavar="NAME|DIR|FILE.gguf", help="The model to write.")],
    out: Annotated[Path, typer.Option(metavar="FILE", callback=writable, help="Where to write it.")],
    kind: Annotated[str, typer.Option("--type", metavar="f32|bf16|q8_0", help="How its matrices are stored.")] = "f32",
) -> None:
    """Write a model as a GGUF file, for llama.cpp. Llama, Mistral, Qwen2 and Qwen3 are known, with byte-level BPE."""
    from coppice.checkpoints.files import one_line
    from coppice.checkpoints.gguf_export import TYPES, export_gguf
    from coppice.core.errors import CoppiceError

    if kind not in TYPES:
        raise typer.BadParameter(f"must be one of {', '.join(TYPES)}", param_hint="--type")
    directory = Path(here(target, "--target"))
    if not directory.is_dir():
        raise typer.BadParameter(f"there is no directory {directory}", param_hint="--target")
    if not out.parent.is_dir():
        raise typer.BadParameter(f"there is no directory {out.parent}", param_hint="--out")
    try:
        export_gguf(directory, out, kind)
    except (CoppiceError, OSError, ValueError, ImportError) as error:
        if isinstance(error, OSError) and of_file(error):
            raise
        typer.echo(f"coppice: {target} cannot be exported: {one_line(error)}", err=True)
        raise typer.Exit(1) from error
    typer.echo(f"wrote {out}, {out.stat().st_size >> 20} MiB")
