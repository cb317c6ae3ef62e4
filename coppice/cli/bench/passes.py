"""`coppice bench passes`: one pass of the target."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coppice.checkpoints.bundled import MODELS
from coppice.cli.bench.options import Seed, numbers, require_checkpoint
from coppice.cli.options import Device, Threads, require_device
from coppice.kernels.openmp import set_spin_count


def passes(
    target: Annotated[Path, typer.Option(help="The target's checkpoint directory.")] = MODELS / "target",
    out: Annotated[Path, typer.Option(help="Directory for passes.json and passes.png.")] = Path("results"),
    rows: Annotated[str, typer.Option(metavar="N,N,…", help="Rows of a pass.")] = "1,2,4,8,16,32,64,128,256",
    context: Annotated[str, typer.Option(metavar="N,N,…", help="Tokens before them.")] = "64,256,1024",
    repeats: Annotated[int, typer.Option(min=2, help="Passes of each kind.")] = 15,
    device: Device = "",
    threads: Threads = 0,
    seed: Seed = 0,
) -> None:
    """One pass of the target by rows and context, beside transformers' own forward, in turn."""
    set_spin_count()
    require_device(device)
    require_checkpoint(target, "--target")
    sizes, contexts = numbers(rows, "--rows"), numbers(context, "--context")

    from coppice.lab.bench.contenders import BenchmarkError
    from coppice.lab.bench.passes import PassesPlan, measure_passes
    from coppice.lab.bench.plot import plot_passes
    from coppice.lab.bench.report import write_json
    from coppice.lab.bench.table import print_passes

    try:
        report = measure_passes(target, PassesPlan(contexts, sizes, repeats, seed), threads, device or "auto")
    except BenchmarkError as error:
        typer.echo(f"coppice: {error}", err=True)
        raise typer.Exit(1) from error
    write_json(report, out / "passes.json")
    plot_passes(report["rows"], out / "passes.png")
    print_passes(report)
    typer.echo(f"wrote {out / 'passes.json'} and {out / 'passes.png'}")
