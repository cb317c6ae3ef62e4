"""`coppice bench`: how fast this is, and beside what."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from coppice.bundled import MODELS
from coppice.cli.child import ChildError
from coppice.cli.options import Device, Threads, require_device
from coppice.cli.topology import DEFAULT_KIND as SMALL_LM
from coppice.cli.topology import NO_DRAFTER, DrafterSpec, Topology, TopologySpec
from coppice.openmp import set_spin_count

if TYPE_CHECKING:
    from benchmarks.load.arrivals import Arrival
    from benchmarks.prompts import Prompt

app = typer.Typer(help="Measure speed, with a table, JSON and plots.", no_args_is_help=True)

MAX_NODES_VARIABLE = "MAX_NODES"
MAX_SWEPT_NODES = 1024
# Of arrivals; far above it, a client measures how fast it opens streams.
MAX_RATE = 10

PromptsFile = Annotated[
    Path | None,
    typer.Option(
        help="JSON lines with `prompt` or `turns`, .gz too. "
        "Default: cut from standard-library files that no bundled model was trained on."
    ),
]
NumPrompts = Annotated[int, typer.Option(min=1, help="How many prompts to use; fewer if the file has fewer.")]
Seed = Annotated[int, typer.Option(min=0, help="Of the generated prompts, and of sampling.")]


@app.command()
def prompts(
    out: Annotated[Path, typer.Option(help="The file to write, JSON lines.")],
    num_prompts: NumPrompts = 20,
    seed: Seed = 0,
) -> None:
    """Write code prompts cut from held-out files of the standard library."""
    from benchmarks.prompts import write_prompts

    chosen = _choose_prompts(None, num_prompts, seed)
    write_prompts(chosen, out)
    typer.echo(f"wrote {len(chosen)} prompts to {out}")


@app.command()
def latency(
    prompts: PromptsFile = None,
    target: Annotated[Path, typer.Option(help="The target's checkpoint directory.")] = MODELS / "target",
    drafter: Annotated[
        str, typer.Option(metavar="small-lm=DIR", help="The small LM's checkpoint directory.")
    ] = f"{SMALL_LM}={MODELS / SMALL_LM}",
    out: Annotated[Path, typer.Option(help="Directory for latency.json and latency.png.")] = Path("benchmarks/results"),
    num_prompts: NumPrompts = 20,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each completion, EOS or not.")] = 128,
    runs: Annotated[int, typer.Option(min=1, help="Passes over all prompts; at least 3 to be quoted.")] = 3,
    temperature: Annotated[list[float] | None, typer.Option(help="Repeatable. Default: 0 and 1.")] = None,
    threads: Threads = 0,
    seed: Seed = 0,
    sweep_nodes: Annotated[
        str, typer.Option(metavar="N,N,…", help="Measure speculation with these node budgets as well.")
    ] = "",
) -> None:
    """One stream: transformers, transformers assisted, and us with speculation off and on, in turn.

    Exit code 1 when our output with speculation on is not what it is with speculation off.
    """
    # Before torch is imported: while another contender works, our waiting threads must sleep.
    set_spin_count()
    small_lm = _small_lm_directory(drafter)
    _require_checkpoint(target, "--target")
    _require_checkpoint(small_lm, "--drafter")
    budgets = _node_budgets(sweep_nodes)
    chosen = _choose_prompts(prompts, num_prompts, seed)
    temperatures = _temperatures(temperature)

    from benchmarks.latency import Plan
    from benchmarks.latency_suite import LatencySuite

    spec = TopologySpec(str(target), (DrafterSpec(SMALL_LM, str(small_lm)),), threads=threads)
    plan = Plan(runs, max_tokens, temperatures, seed)
    # The services' own default, which they take for 0 threads.
    num_threads = threads or os.cpu_count() or 1
    default_nodes = _allow_nodes(budgets)
    suite = LatencySuite(target, small_lm, tuple(chosen), plan, num_threads, default_nodes, budgets)
    _report(_measure_or_exit(suite, spec), out)


@app.command()
def passes(
    target: Annotated[Path, typer.Option(help="The target's checkpoint directory.")] = MODELS / "target",
    out: Annotated[Path, typer.Option(help="Directory for passes.json and passes.png.")] = Path("benchmarks/results"),
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
    _require_checkpoint(target, "--target")
    sizes, contexts = _numbers(rows, "--rows"), _numbers(context, "--context")

    from benchmarks.contenders import BenchmarkError
    from benchmarks.passes import PassesPlan, measure_passes
    from benchmarks.plot import plot_passes
    from benchmarks.report import write_json
    from benchmarks.table import print_passes

    try:
        report = measure_passes(target, PassesPlan(contexts, sizes, repeats, seed), threads, device or "auto")
    except BenchmarkError as error:
        typer.echo(f"coppice: {error}", err=True)
        raise typer.Exit(1) from error
    write_json(report, out / "passes.json")
    plot_passes(report["rows"], out / "passes.png")
    print_passes(report)
    typer.echo(f"wrote {out / 'passes.json'} and {out / 'passes.png'}")


@app.command()
def throughput(
    prompts: PromptsFile = None,
    target: Annotated[Path, typer.Option(help="The target's checkpoint directory.")] = MODELS / "target",
    drafter: Annotated[str, typer.Option(metavar="KIND=DIR", help="The drafter's checkpoint directory.")] = (
        f"{SMALL_LM}={MODELS / SMALL_LM}"
    ),
    out: Annotated[Path, typer.Option(help="Directory for throughput.json and throughput.png.")] = Path(
        "benchmarks/results"
    ),
    concurrency: Annotated[str, typer.Option(metavar="N,N,…", help="Requests at once.")] = "1,4,16,64",
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each completion, EOS or not.")] = 64,
    runs: Annotated[int, typer.Option(min=1, help="Batches of each size; at least 3 to be quoted.")] = 3,
    threads: Threads = 0,
    seed: Seed = 0,
) -> None:
    """Many requests at once: transformers' batched and continuous batching, and us with speculation off and on.

    Exit code 1 when our output with speculation on is not what it is with speculation off.
    """
    set_spin_count()
    _require_checkpoint(target, "--target")
    levels = _numbers(concurrency, "--concurrency")
    if not levels:
        raise typer.BadParameter("--concurrency: needs at least one number")
    chosen = _choose_prompts(prompts, max(levels), seed)

    from benchmarks.plot import plot_throughput
    from benchmarks.report import write_json
    from benchmarks.table import print_throughput
    from benchmarks.throughput import ThroughputPlan
    from benchmarks.throughput_suite import ThroughputSuite

    spec = TopologySpec(str(target), (_drafter_spec(drafter),), threads=threads)
    plan = ThroughputPlan(levels, runs, max_tokens)
    report = _measure_or_exit(ThroughputSuite(target, tuple(chosen), plan, threads or os.cpu_count() or 1), spec)
    write_json(report, out / "throughput.json")
    plot_throughput(report["rows"], out / "throughput.png")
    print_throughput(report)
    typer.echo(f"wrote {out / 'throughput.json'} and {out / 'throughput.png'}")
    if report["mismatches"]:
        raise typer.Exit(1)


@app.command()
def load(
    prompts: PromptsFile = None,
    target: Annotated[Path, typer.Option(help="The target's checkpoint directory.")] = MODELS / "target",
    drafter: Annotated[str, typer.Option(metavar="KIND=DIR", help="The drafter's checkpoint directory.")] = (
        f"{SMALL_LM}={MODELS / SMALL_LM}"
    ),
    out: Annotated[Path, typer.Option(help="Directory for load.json and load.png.")] = Path("benchmarks/results"),
    concurrency: Annotated[str, typer.Option(metavar="N,N,…", help="Requests at once.")] = "1,2,4,8,16,32,64",
    runs: Annotated[int, typer.Option(min=1, help="Windows of each kind; at least 3 to be quoted.")] = 3,
    duration: Annotated[float, typer.Option(min=0.25, help="Seconds of a window; of each level of the step.")] = 10.0,
    rates: Annotated[
        str, typer.Option(metavar="F,F,…", help="Arrivals, in shares of saturation without speculation; empty: none.")
    ] = "0.3,0.6,0.9,1.2",
    trace: Annotated[
        Path | None, typer.Option(help="Arrivals as in this CSV file, with TIMESTAMP and GeneratedTokens.")
    ] = None,
    trace_speed: Annotated[float, typer.Option(min=0.001, help="How many times as fast the trace is played.")] = 1.0,
    step: Annotated[int, typer.Option(min=0, help="Requests at once on top of the step; 0 for no step.")] = 64,
    ttft_ms: Annotated[float, typer.Option(min=0, help="Target of goodput: time to the first token.")] = 1000.0,
    tpot_ms: Annotated[float, typer.Option(min=0, help="Target of goodput: time per token after it.")] = 50.0,
    num_prompts: NumPrompts = 64,
    output_tokens: Annotated[str, typer.Option(metavar="MIN,MAX", help="Outputs are of random lengths.")] = "32,128",
    temperature: Annotated[float, typer.Option(min=0, max=100, help="Of every request.")] = 0.0,
    threads: Threads = 0,
    seed: Seed = 0,
) -> None:
    """Load through the public API: speculation off, small and large fixed budgets and the planner, in turn.

    So many requests at once, requests that arrive whatever the server does, and a step. Exit code 1 when a token is not
    what it is with speculation off.
    """
    set_spin_count()
    _require_checkpoint(target, "--target")
    levels = _numbers(concurrency, "--concurrency")
    if not levels:
        raise typer.BadParameter("--concurrency: needs at least one number")
    shortest, longest = _length_range(output_tokens)
    shares = _rates(rates)
    chosen = _choose_prompts(prompts, num_prompts, seed)

    from benchmarks.load.figures import Targets
    from benchmarks.load.plot import plot_load
    from benchmarks.load.suite import LoadPlan, LoadSuite
    from benchmarks.load.table import print_load
    from benchmarks.report import write_json

    targets = Targets(ttft_ms / 1000, tpot_ms / 1000)
    plan = LoadPlan(levels, runs, duration, shares, _read_trace(trace), trace_speed, step, targets)
    num_threads = threads or os.cpu_count() or 1
    suite = LoadSuite(target, tuple(chosen), plan, num_threads, shortest, longest, temperature, seed)
    report = _measure_or_exit(suite, TopologySpec(str(target), (_drafter_spec(drafter),), threads=threads))
    write_json(report, out / "load.json")
    plot_load(report, out / "load.png")
    print_load(report)
    typer.echo(f"wrote {out / 'load.json'} and {out / 'load.png'}")
    if report["mismatches"]:
        raise typer.Exit(1)


@app.command()
def cache(
    prompts: PromptsFile = None,
    target: Annotated[Path, typer.Option(help="The target's checkpoint directory.")] = MODELS / "target",
    drafter: Annotated[
        str, typer.Option(metavar="KIND=DIR|none", help="The drafter beside the cache; none: the cache alone.")
    ] = f"{SMALL_LM}={MODELS / SMALL_LM}",
    out: Annotated[Path, typer.Option(help="Directory for cache.json and cache.png.")] = Path("benchmarks/results"),
    systems: Annotated[int, typer.Option(min=1, help="System prompts, the beginnings that prompts share.")] = 3,
    endings: Annotated[int, typer.Option(min=1, help="Prompts with each of them.")] = 3,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each completion, EOS or not.")] = 48,
    runs: Annotated[int, typer.Option(min=1, help="Times that the cache is filled; at least 3 to be quoted.")] = 3,
    temperature: Annotated[list[float] | None, typer.Option(help="Repeatable. Default: 0 and 1.")] = None,
    threads: Threads = 0,
    seed: Seed = 0,
) -> None:
    """The prefix cache under shared system prompts and repeated code: cold, warm, through Redis, and Redis killed.

    The cache beside a drafter and alone, one request at a time. Exit code 1 when a request failed, or when a token is
    not what it is with speculation off.
    """
    set_spin_count()
    _require_checkpoint(target, "--target")
    drafters = () if drafter == NO_DRAFTER else (_drafter_spec(drafter),)

    from benchmarks.cache.measure import CachePlan, settings
    from benchmarks.cache.plot import plot_cache
    from benchmarks.cache.services import measure_on_services
    from benchmarks.cache.suite import CacheSuite
    from benchmarks.cache.table import print_cache
    from benchmarks.cache.workload import make_workload, num_pieces
    from benchmarks.report import write_json

    chosen = _choose_prompts(prompts, needed := num_pieces(systems, endings), seed)
    if len(chosen) < needed:
        raise typer.BadParameter(f"--prompts: {systems} system prompts x {endings} endings are made of {needed}")
    plan = CachePlan(settings(one.kind for one in drafters), _temperatures(temperature), runs, max_tokens, seed)
    suite = CacheSuite(target, make_workload(chosen, systems, endings), plan, threads or os.cpu_count() or 1)
    spec = TopologySpec(str(target), drafters, threads=threads)
    report = _run_or_exit(measure_on_services(suite.run, spec))
    write_json(report, out / "cache.json")
    plot_cache(report, out / "cache.png")
    print_cache(report)
    typer.echo(f"wrote {out / 'cache.json'} and {out / 'cache.png'}")
    if report["mismatches"] or report["ratios"]["failed-requests"]:
        raise typer.Exit(1)


class Suite(Protocol):
    """A benchmark of services at an address."""

    def run(self, address: str) -> dict[str, Any]:
        """Measure and return the report."""
        ...


def _measure_or_exit(suite: Suite, spec: TopologySpec) -> dict[str, Any]:
    return _run_or_exit(_measure(suite, spec))


def _run_or_exit(measuring: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    from benchmarks.contenders import BenchmarkError

    try:
        return asyncio.run(measuring)
    except (BenchmarkError, ChildError) as error:
        typer.echo(f"coppice: {error}", err=True)
        raise typer.Exit(1) from error


async def _measure(suite: Suite, spec: TopologySpec) -> dict[str, Any]:
    """Run the suite in a thread, beside services whose failure ends it: without a drafter it would mean nothing."""
    topology = Topology(spec)
    tasks: list[asyncio.Task[Any]] = []
    try:
        await topology.start()
        measured = asyncio.create_task(asyncio.to_thread(suite.run, topology.address))
        failed = asyncio.create_task(topology.failed())
        tasks = [measured, failed]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            raise failed.result()
        return measured.result()
    finally:
        # The thread ends with the first call to a server that is gone.
        await topology.stop()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _report(report: dict[str, Any], out: Path) -> None:
    from benchmarks.plot import plot_latency
    from benchmarks.report import write_json
    from benchmarks.table import print_report

    write_json(report, out / "latency.json")
    plot_latency(report["rows"], out / "latency.png")
    print_report(report)
    typer.echo(f"wrote {out / 'latency.json'} and {out / 'latency.png'}")
    if report["mismatches"]:
        raise typer.Exit(1)


def _allow_nodes(budgets: Sequence[int]) -> int | None:
    """Let the services, which inherit our environment, take the largest budget that is swept.

    Returns the budget that requests without one had until then, or None where nothing has changed.
    """
    from orchestrator.config import Config

    limit = int(os.environ.get(MAX_NODES_VARIABLE, Config.max_nodes))
    if max(budgets, default=0) <= limit:
        return None
    os.environ[MAX_NODES_VARIABLE] = str(max(budgets))
    return limit


def _choose_prompts(path: Path | None, num_prompts: int, seed: int) -> list[Prompt]:
    from benchmarks.prompts import PromptsError, held_out_prompts, read_prompts

    try:
        return held_out_prompts(num_prompts, seed) if path is None else read_prompts(path)[:num_prompts]
    except PromptsError as error:
        raise typer.BadParameter(str(error)) from error


def _drafter_spec(drafter: str) -> DrafterSpec:
    try:
        return DrafterSpec.parse(drafter)
    except ValueError as error:
        raise typer.BadParameter(f"--drafter: {error}") from error


def _small_lm_directory(drafter: str) -> Path:
    spec = _drafter_spec(drafter)
    if spec.kind != SMALL_LM:
        # It is transformers' assistant too, which has to be a language model.
        raise typer.BadParameter(f"--drafter: this suite takes a {SMALL_LM}, got {drafter!r}")
    return Path(spec.model)


def _require_checkpoint(directory: Path, option: str) -> None:
    if not (directory / "config.json").is_file():
        raise typer.BadParameter(f"{option}: no checkpoint in {directory}")


def _temperatures(chosen: list[float] | None) -> tuple[float, ...]:
    temperatures = tuple(dict.fromkeys(chosen or (0.0, 1.0)))
    for value in temperatures:
        if not 0 <= value <= 100:
            raise typer.BadParameter(f"--temperature: must be in [0, 100], got {value}")
    return temperatures


def _numbers(text: str, option: str) -> tuple[int, ...]:
    try:
        numbers = tuple(dict.fromkeys(int(part) for part in text.split(",") if part.strip()))
    except ValueError:
        numbers = (0,)
    if any(number < 1 for number in numbers):
        raise typer.BadParameter(f"{option}: needs numbers such as 4,8,16, got {text!r}")
    return numbers


def _rates(text: str) -> tuple[float, ...]:
    try:
        rates = tuple(dict.fromkeys(float(part) for part in text.split(",") if part.strip()))
    except ValueError:
        rates = (0.0,)
    if not all(0 < rate < MAX_RATE for rate in rates):
        raise typer.BadParameter(f"--rates: needs numbers above 0 and below {MAX_RATE} such as 0.3,0.9, got {text!r}")
    return rates


def _length_range(text: str) -> tuple[int, int]:
    numbers = _numbers(text, "--output-tokens")
    if not 1 <= len(numbers) <= 2 or list(numbers) != sorted(numbers):
        raise typer.BadParameter(f"--output-tokens: needs a range such as 32,128, got {text!r}")
    return numbers[0], numbers[-1]


def _read_trace(path: Path | None) -> tuple[Arrival, ...]:
    from benchmarks.load.arrivals import TraceError, read_trace

    try:
        return () if path is None else tuple(read_trace(path))
    except TraceError as error:
        raise typer.BadParameter(f"--trace: {error}") from error


def _node_budgets(text: str) -> tuple[int, ...]:
    budgets = _numbers(text, "--sweep-nodes")
    for nodes in budgets:
        if not 1 <= nodes <= MAX_SWEPT_NODES:
            raise typer.BadParameter(f"--sweep-nodes: {nodes} is not in [1, {MAX_SWEPT_NODES}]")
    return budgets
