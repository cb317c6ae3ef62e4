"""`python -m tests.fuzz.guided`: inputs that reach new code, at every parser of a stranger's bytes (`parsers.py`).

libFuzzer changes inputs, and keeps those that run branches of ours that none ran before. It needs the package atheris,
which counts branches and has wheels for some platforms and versions of Python: `make guided` installs it.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from coppice.lab.bench.environment import describe_machine, describe_run

# An input that takes longer hangs, seconds; and memory of a parser's process, MiB.
TIMEOUT_S, MEMORY_MIB = 20, 2048
MAX_BYTES = 8192
OURS = ["coppice", "orchestrator", "verifier_svc", "drafter_svc"]
PARSERS = ("orchestrator", "verifier", "drafter", "answers", "gateway", "http2")
_DONE = re.compile(r"Done (\d+) runs")
_BRANCHES = re.compile(r"cov: (\d+)")


def main(
    inputs: Annotated[int, typer.Option(min=1, help="Inputs, over all parsers.")] = 1_000_000,
    parsers: Annotated[str, typer.Option(help="Parsers, with commas.")] = ",".join(PARSERS),
    seed: Annotated[int, typer.Option(min=1, help="The same seed draws the same inputs.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Write what happened there, as JSON.")] = None,
    child: Annotated[str, typer.Option(hidden=True)] = "",
    corpus: Annotated[Path, typer.Option(hidden=True)] = Path(),
) -> None:
    """Fuzz parsers, one process each; print what happened. Exit code 1 where an input did what none may."""
    if child:
        fuzz_one(child, inputs, seed, corpus)
    machine, results, failed = describe_machine(), {}, False
    names = parsers.split(",")
    for name in names:
        results[name] = found = fuzzed(name, -(-inputs // len(names)), seed)
        failed = failed or bool(found["failure"])
        typer.echo(
            f"{name:>14}  {found['inputs']:>9,} inputs  {found['branches']:>6,} branches  {found['seconds']:>5} s"
        )
        if found["failure"]:
            typer.echo(found["failure"])
    typer.echo(f"{sum(found['inputs'] for found in results.values()):,} inputs, {'FAILED' if failed else 'no failure'}")
    if out is not None:
        command = f"python -m tests.fuzz.guided {shlex.join(sys.argv[1:])}"
        text = json.dumps({"guided": results, "seed": seed, **describe_run(machine), "command": command}, indent=2)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n")
    raise typer.Exit(failed)


def fuzzed(name: str, num_inputs: int, seed: int) -> dict[str, Any]:
    """Fuzz one parser in a process of its own, from its seeds on."""
    from tests.fuzz.parsers import PARSERS as MADE

    started = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        corpus = Path(directory) / "corpus"
        corpus.mkdir()
        with asyncio.Runner() as runner:
            seeds = MADE[name](random.Random(seed), runner.run).seeds
        for number, one in enumerate(seeds):
            (corpus / f"{number:04}").write_bytes(one)
        options = ("--child", name, "--inputs", str(num_inputs), "--seed", str(seed), "--corpus", str(corpus))
        command = [sys.executable, "-m", "tests.fuzz.guided", *options]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
    said = done.stderr.decode(errors="replace")
    num_runs, branches = _DONE.search(said), _BRANCHES.findall(said)
    failure = "" if done.returncode == 0 and num_runs else said[-4000:] or f"exit code {done.returncode}"
    return {
        "inputs": int(num_runs[1]) if num_runs else 0,
        "branches": int(branches[-1]) if branches else 0,
        "seconds": round(time.monotonic() - started),
        "failure": failure,
    }


def fuzz_one(name: str, num_inputs: int, seed: int, corpus: Path) -> None:
    """Fuzz one parser in this process; does not return."""
    import atheris

    with atheris.instrument_imports(include=OURS, enable_loader_override=False):
        from tests.fuzz.parsers import PARSERS as MADE

    take = MADE[name](random.Random(seed), asyncio.Runner().run).take
    # Its own options begin with one dash.
    options = {
        "runs": num_inputs,
        "seed": seed,
        "max_len": MAX_BYTES,
        "timeout": TIMEOUT_S,
        "rss_limit_mb": MEMORY_MIB,
        "artifact_prefix": f"{corpus.parent}/",
    }
    atheris.Setup([sys.argv[0], *(f"-{key}={value}" for key, value in options.items()), str(corpus)], take)
    atheris.Fuzz()


if __name__ == "__main__":
    typer.run(main)
