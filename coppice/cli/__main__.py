"""Entry point of `coppice` and `python -m coppice.cli`."""

from __future__ import annotations

from typing import Annotated

import typer

from coppice.cli import (
    adapt,
    bench,
    chat,
    conformance,
    demo,
    doctor,
    export,
    generate,
    models,
    simulate,
    token,
    top,
    train,
    up,
)
from coppice.cli.errors import Commands
from coppice.cli.options import with_groups
from coppice.kernels.cpu.huge_pages import start_with_huge_pages
from coppice.version import VERSION

app = typer.Typer(cls=Commands, help="Disaggregated speculative decoding over gRPC, lossless.", no_args_is_help=True)
app.command()(up.up)
app.command()(with_groups(generate.generate))
app.command()(with_groups(chat.chat))
app.command()(demo.demo)
app.command()(adapt.adapt)
app.command()(with_groups(top.top))
app.command()(models.models)
app.command()(doctor.doctor)
app.command()(with_groups(conformance.conformance))
app.command()(simulate.simulate)
app.add_typer(bench.app, name="bench")
app.add_typer(export.app, name="export")
app.add_typer(train.app, name="train")
app.add_typer(token.app, name="token")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"coppice {VERSION}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line."""
    start_with_huge_pages()
    app()


if __name__ == "__main__":
    main()
