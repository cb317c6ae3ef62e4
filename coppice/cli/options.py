"""Command-line options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from coppice.bundled import MODELS
from coppice.cli.topology import TopologySpec, parse_drafters

Target = Annotated[str, typer.Option(help="Checkpoint directory or hub id of the target. Default: the bundled one.")]
Drafters = Annotated[
    list[str] | None,
    typer.Option(
        "--drafter",
        metavar="KIND[=PATH_OR_HUB_ID]",
        help="A drafter; repeatable. `none` for the prefix cache alone. Default: small-lm, the bundled one.",
    ),
]
Device = Annotated[str, typer.Option(help="cpu or cuda. Default: what is there.")]
Threads = Annotated[int, typer.Option(min=0, help="Threads of each model; 0 leaves them to the service.")]

Token = Annotated[
    str, typer.Option(envvar="COPPICE_TOKEN", show_default=False, help="Bearer token, where the server asks for one.")
]

DEFAULT_TARGET = str(MODELS / "target")


def topology_spec(
    target: str, drafters: list[str] | None, port: int = 0, device: str = "", threads: int = 0
) -> TopologySpec:
    """What the options describe.

    Raises:
        typer.BadParameter: they describe nothing that can be run.
    """
    try:
        parsed = parse_drafters(drafters)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--drafter") from error
    require_device(device)
    return TopologySpec(target=target, drafters=parsed, port=port, device=device, threads=threads)


def require_device(device: str) -> None:
    """Raise typer.BadParameter unless `device` is one, or empty."""
    if device not in ("", "cpu", "cuda"):
        raise typer.BadParameter(f"must be cpu or cuda, got {device!r}", param_hint="--device")
