"""`coppice bench passes`: one pass of the target."""

from __future__ import annotations

from typing import Annotated

import typer

from coppice.cli.bench import options as opt
from coppice.cli.bench.services import explained, finish
from coppice.cli.options import Device, Threads, require_device


def passes(
    target: opt.Target = opt.TARGET,
    out: opt.Out = opt.OUT,
    rows: Annotated[str, typer.Option(metavar="N,N,…", help="Rows of a pass.")] = "1,2,4,8,16,32,64,128,256",
    context: Annotated[str, typer.Option(metavar="N,N,…", help="Tokens before them.")] = "64,256,1024",
    repeats: Annotated[int, typer.Option(min=2, help="Passes of each kind.")] = 15,
    device: Device = "",
    threads: Threads = 0,
    seed: opt.Seed = 0,
) -> None:
    """One pass of the target by rows and context, and transformers' own forward, in turn."""
    require_device(device)
    opt.begin(target)
    sizes, contexts = opt.numbers(rows, "--rows", least=1), opt.numbers(context, "--context", least=1)

    from coppice.lab.bench.passes import SHOWN, PassesPlan, measure_passes

    with explained():
        report = measure_passes(target, PassesPlan(contexts, sizes, repeats, seed), threads, device or "auto")
    finish(report, SHOWN, out)
