"""Commands of `coppice bench`, but for the ablations."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coppice.checkpoints.bundled import fitting_drafters
from coppice.checkpoints.catalogue import CATALOGUE
from coppice.cli.bench import options as opt
from coppice.cli.bench.options import finish, measured
from coppice.cli.options import (
    AUTO,
    HEAD_KIND,
    Device,
    Threads,
    chosen_head,
    refusing,
    require_device,
    topology_spec,
)
from coppice.cli.topology import DEFAULT_KIND, NO_DRAFTER, TopologySpec

if TYPE_CHECKING:
    from coppice.lab.bench.forms import Form
    from coppice.lab.bench.load.loads import Arrival
    from coppice.lab.bench.precisions import Precision


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


NO_DELAY = "0"


def latency(
    options: opt.PromptSuiteOptions,
    drafter: Annotated[
        str,
        typer.Option(
            metavar="small-lm=DIR|none",
            help="The small LM's checkpoint directory. none: the target's own sources alone. "
            "Default: the bundled small LM for the bundled target, none for others.",
        ),
    ] = "",
    num_prompts: opt.NumPrompts = 20,
    per_category: opt.PerCategory = 0,
    max_tokens: opt.MaxTokens = 128,
    runs: opt.Runs = 3,
    temperature: opt.Temperatures = None,
    forms: Annotated[
        str,
        typer.Option(
            metavar="FORM,FORM,…",
            help="Measure these forms of the deployment as well: asynchronous, draft-ahead, synchronous, colocated.",
        ),
    ] = "",
    delays: Annotated[
        str,
        typer.Option(metavar="MS,MS,…", help="With --forms: add so much to the way between orchestrator and drafter."),
    ] = NO_DELAY,
    precisions: Annotated[
        str | None,
        typer.Option(
            metavar="f32,bf16,int8",
            help="Measure the target in these precisions as well: us without speculation, transformers, and llama.cpp "
            "where the package xllamacpp is installed. Default: all of them for models of the catalogue.",
        ),
    ] = None,
) -> None:
    """One stream: transformers, transformers assisted, and us with speculation off and on, in turn.

    With --forms, also us as deployments whose rounds and drafters go together in other ways, or are further apart.
    Exit code 1 when our output with speculation on is not what it is with speculation off.
    """
    spec, small_lm = _fitting(options, drafter, far=bool(forms.strip()))
    chosen = options.choose_prompts(num_prompts, per_category=per_category)
    temperatures = opt.choose_temperatures(temperature)
    chosen_forms = _forms(forms, delays)
    chosen_precisions = _precisions(options.target, precisions)

    from coppice.lab.bench.forms import PANEL
    from coppice.lab.bench.harness.plots import draw
    from coppice.lab.bench.latency import SHOWN, LatencySuite, measure_latency

    setup = options.setup(chosen, runs, max_tokens, temperatures)
    suite = LatencySuite(setup, small_lm)
    report = asyncio.run(measure_latency(suite, spec, chosen_forms, chosen_precisions))
    if chosen_forms:
        draw(report, [PANEL], options.out / "forms.png")
    options.finish(report, SHOWN)


def _fitting(options: opt.SuiteOptions, drafter: str, *, far: bool = False) -> tuple[TopologySpec, Path | None]:
    """The target with the drafter of --drafter, or what `coppice up` drafts with; and the small LM, for others' use.

    `far`: with drafters that are services, whatever fits.

    Raises typer.BadParameter where a checkpoint is missing.
    """
    target = options.target
    head = "" if drafter or far else chosen_head(AUTO, target.name, None, "")
    made_for_it = [opt.DRAFTER] if target == opt.TARGET else fitting_drafters(target.name)
    chosen = NO_DRAFTER if head else drafter or next(iter(made_for_it), NO_DRAFTER)
    spec = replace(options.topology(chosen), head=head)
    options.begin()
    for one in spec.drafters:
        opt.require_checkpoint(Path(one.model), "--drafter")
    return spec, next((Path(one.model) for one in spec.drafters if one.kind == DEFAULT_KIND), None)


def _forms(names: str, delays: str) -> tuple[Form, ...]:
    """The forms asked for; raises typer.BadParameter where one cannot be had."""
    if not names.strip():
        if delays != NO_DELAY:
            raise typer.BadParameter("--delays: says how far apart the services of --forms are")
        return ()
    from coppice.lab.bench.forms import parse_forms
    from coppice.lab.bench.harness.experiment import BenchmarkError

    with refusing(None, BenchmarkError):
        return parse_forms(names, delays)


def _precisions(target: Path, names: str | None) -> tuple[Precision, ...]:
    """The precisions asked for; raises typer.BadParameter where one is unknown."""
    from coppice.lab.bench.harness.experiment import BenchmarkError
    from coppice.lab.bench.precisions import PRECISIONS, parse_precisions

    if names is None:
        return tuple(PRECISIONS.values()) if target.name in CATALOGUE else ()
    with refusing(None, BenchmarkError):
        return parse_precisions(names)


MOST_AT_ONCE = 256


def peers(
    options: opt.PromptSuiteOptions,
    drafter: Annotated[
        str,
        typer.Option(
            metavar="KIND=DIR|none",
            help="The drafter's checkpoint directory; none: the target's own sources alone. "
            "Default: the one that is made for the target.",
        ),
    ] = "",
    num_prompts: opt.NumPrompts = 20,
    per_category: opt.PerCategory = 0,
    humaneval: Annotated[
        Path | None, typer.Option(help="Prompts of HumanEval as well, JSON lines, as many as of a category.")
    ] = None,
    hard: Annotated[
        bool,
        typer.Option(
            "--hard", help="Also prompts that drafters hardly guess after: random, base64, rare languages, long."
        ),
    ] = False,
    max_tokens: opt.MaxTokens = 128,
    runs: opt.Runs = 3,
    temperature: opt.Temperatures = None,
    concurrency: opt.Concurrency = "1,4,16",
    precisions: Annotated[
        str, typer.Option(metavar="f32,bf16,int8", help="Of llama.cpp, and of us without speculation.")
    ] = "bf16,int8",
    others: Annotated[
        str, typer.Option("--peers", metavar="NAME,NAME,…", help="Engines that take part.")
    ] = "transformers,llama.cpp,openvino",
) -> None:
    """Other engines and us on the same weights and prompts, with speculation and without, in turn.

    `make peers` installs them; those that are missing are named. One stream over kinds of prompts, then requests at
    once. Exit code 1 when a token of ours is not what it is with speculation off.
    """
    spec, small_lm = _fitting(options, drafter)
    chosen = options.choose_prompts(num_prompts, per_category=per_category)
    code = [] if humaneval is None else opt.choose_prompts(humaneval, per_category or num_prompts, options.seed)
    temperatures = opt.choose_temperatures(temperature)
    levels = opt.numbers(concurrency, "--concurrency", most=MOST_AT_ONCE)
    chosen_precisions = _precisions(options.target, precisions)

    from coppice.lab.bench.peers.figures import HUMANEVAL
    from coppice.lab.bench.peers.hard import hard_prompts
    from coppice.lab.bench.peers.suite import PEERS, SHOWN, PeersPlan, PeersSuite
    from coppice.lab.bench.prompts import PromptsError

    plan = PeersPlan(opt.choose_parts(others, PEERS, "--peers"), chosen_precisions, levels)
    chosen += [replace(one, category=HUMANEVAL) for one in code]
    with refusing("--hard", PromptsError):
        chosen += hard_prompts(options.seed) if hard else []
    setup = options.setup(chosen, runs, max_tokens, temperatures)
    kinds = (*(one.kind for one in spec.drafters), *([HEAD_KIND] if spec.head else []))
    suite = PeersSuite(setup, kinds, small_lm, plan)
    options.finish(measured(suite.run, spec), SHOWN)


def passes(
    options: opt.SuiteOptions,
    rows: Annotated[str, typer.Option(metavar="N,N,…", help="Rows of a pass.")] = "1,2,4,8,16,32,64,128,256",
    context: Annotated[str, typer.Option(metavar="N,N,…", help="Tokens before them.")] = "64,256,1024",
    repeats: Annotated[int, typer.Option(min=2, help="Passes of each kind.")] = 15,
    device: Device = "",
    dtype: Annotated[
        str, typer.Option(metavar="auto|float32|bfloat16", help="Numbers of both, as the verifier's DTYPE has it.")
    ] = "auto",
) -> None:
    """One pass of the target by rows and context, and transformers' own forward, in turn."""
    require_device(device)
    options.begin()
    sizes, contexts = opt.numbers(rows, "--rows", least=1), opt.numbers(context, "--context", least=1)

    from coppice.lab.bench.passes import SHOWN, PassesPlan, measure_passes

    plan = PassesPlan(contexts, sizes, repeats, options.seed)
    report = measure_passes(options.target, plan, options.threads, device or "auto", dtype)
    options.finish(report, SHOWN)


def sampling(
    out: opt.Out = opt.OUT,
    vocab: Annotated[str, typer.Option(metavar="N,N,…", help="Tokens of a vocabulary.")] = "4096,49152,151936,262144",
    rows: Annotated[str, typer.Option(metavar="N,N,…", help="Rows of a pass.")] = "1,16,64,256",
    repeats: Annotated[int, typer.Option(min=2, help="Passes of each kind.")] = 5,
    threads: Threads = 0,
    seed: opt.Seed = 0,
) -> None:
    """Drawing tokens from rows of logits by vocabulary and rows, and their definition in NumPy, in turn. No models."""
    vocabs, sizes = opt.numbers(vocab, "--vocab", least=1), opt.numbers(rows, "--rows", least=1)

    from coppice.lab.bench.sampling import SHOWN, SamplingPlan, measure_sampling

    report = measure_sampling(SamplingPlan(vocabs, sizes, repeats, seed), opt.num_threads(threads))
    finish(report, SHOWN, out)


def throughput(
    options: opt.PromptSuiteOptions,
    drafter: opt.Drafter = opt.DRAFTER,
    concurrency: opt.Concurrency = "1,4,16,64",
    max_tokens: opt.MaxTokens = 64,
    runs: opt.Runs = 3,
) -> None:
    """Many requests at once: transformers' batched and continuous batching, and us with speculation off and on.

    Exit code 1 when our output with speculation on is not what it is with speculation off.
    """
    options.begin()
    levels = opt.numbers(concurrency, "--concurrency", least=1)
    chosen = options.choose_prompts(max(levels))

    from coppice.lab.bench.throughput import SHOWN, measure_throughput

    spec = options.topology(drafter)
    setup = options.setup(chosen, runs, max_tokens, (0.0,))
    report = measured(lambda topology: measure_throughput(setup, levels, topology.address), spec)
    options.finish(report, SHOWN)


def load(
    options: opt.PromptSuiteOptions,
    drafter: Annotated[
        str,
        typer.Option(
            metavar="KIND=DIR|none",
            help="The drafter's checkpoint directory; none: the bundled target drafts for itself.",
        ),
    ] = opt.DRAFTER,
    concurrency: opt.Concurrency = "1,4,16,64",
    runs: opt.Runs = 3,
    duration: Annotated[float, typer.Option(min=0.25, help="Seconds of a window; of each level of the step.")] = 10.0,
    rates: Annotated[
        str, typer.Option(metavar="F,F,…", help="Arrivals, in shares of saturation without speculation; empty: none.")
    ] = "0.6,0.9,1.2",
    trace: Annotated[
        Path | None, typer.Option(help="Arrivals as in this CSV file, with TIMESTAMP and GeneratedTokens.")
    ] = None,
    trace_speed: Annotated[float, typer.Option(min=0.001, help="How many times as fast the trace is played.")] = 1.0,
    step: Annotated[int, typer.Option(min=0, help="Requests at once on top of the step; 0 for no step.")] = 64,
    ttft_ms: opt.TtftTarget = 1000.0,
    tpot_ms: opt.TpotTarget = 50.0,
    transformers: Annotated[
        bool, typer.Option(help="Whether transformers by itself has its turn with the closed loads (greedy ones).")
    ] = True,
    num_prompts: opt.NumPrompts = 64,
    output_tokens: Annotated[str, typer.Option(metavar="MIN,MAX", help="Outputs are of random lengths.")] = "32,128",
    lengths: Annotated[
        str, typer.Option(metavar="even|lognormal", help="How lengths of outputs are drawn; lognormal: few are long.")
    ] = "even",
    turns: Annotated[
        int,
        typer.Option(
            min=1,
            help="Turns of a conversation. Above 1 the first prompt begins all, and the others are what users say.",
        ),
    ] = 1,
    leaving: Annotated[float, typer.Option(min=0, max=0.5, help="Share of requests whose clients leave early.")] = 0.0,
    protocol: Annotated[
        str, typer.Option(metavar="grpc|http", help="http: OpenAI's API of a gateway in front of the orchestrator.")
    ] = "grpc",
    temperature: Annotated[float, typer.Option(min=0, max=100, help="Of every request.")] = 0.0,
) -> None:
    """Load through the public API: speculation off, small and large fixed budgets and the planner, in turn.

    So many requests at once, requests that arrive whatever the server does, and a step. Exit code 1 when a token is not
    what it is with speculation off, or a request failed.
    """
    options.begin()
    levels = opt.numbers(concurrency, "--concurrency", least=1)
    shortest, longest = opt.length_range(output_tokens)
    shares = opt.rates(rates, "--rates")
    is_lognormal = opt.choice(lengths, "--lengths", ("even", "lognormal")) == "lognormal"
    over_http = opt.choice(protocol, "--protocol", ("grpc", "http")) == "http"
    # The whole conversation has to fit the context.
    chosen = options.choose_prompts(num_prompts, *([opt.TURN_CHARS] if turns > 1 else []))

    from coppice.lab.bench.load.figures import Targets
    from coppice.lab.bench.load.suite import SHOWN, LoadPlan, LoadSuite
    from coppice.lab.bench.services import free_port

    targets = Targets(ttft_ms / 1000, tpot_ms / 1000)
    mixed = turns, leaving, is_lognormal
    plan = LoadPlan(levels, duration, shares, _read_trace(trace), trace_speed, step, targets, transformers, *mixed)
    setup = options.setup(chosen, runs, longest, (temperature,))
    suite = LoadSuite(setup, plan, shortest)
    spec = topology_spec(str(options.target), [drafter], threads=options.threads)
    spec = replace(spec, http_port=asyncio.run(free_port()) if over_http else 0)
    report = measured(lambda topology: suite.run(topology.address, topology.http_address), spec)
    options.finish(report, SHOWN)


def _read_trace(path: Path | None) -> tuple[Arrival, ...]:
    from coppice.lab.bench.load.loads import TraceError, read_trace

    with refusing("--trace", TraceError):
        return () if path is None else tuple(read_trace(path))


def overload(
    options: opt.PromptSuiteOptions,
    drafter: opt.Drafter = opt.DRAFTER,
    factors: Annotated[str, typer.Option(metavar="F,F,…", help="Loads, in multiples of saturation.")] = "1,2,4",
    runs: opt.Runs = 2,
    duration: Annotated[
        float, typer.Option(min=0.25, help="Seconds of a load; the calm one takes twice as long.")
    ] = 20.0,
    recovery: Annotated[float, typer.Option(min=0.25, help="Seconds of calm load after each overload.")] = 10.0,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at once that saturate the server.")] = 32,
    max_token_ms: Annotated[
        float | None,
        typer.Option(min=0, help="MAX_TOKEN_MS of the orchestrator; 0: no bound. Default: by --token-ratio."),
    ] = None,
    token_ratio: Annotated[
        float,
        typer.Option(min=1, help="How much longer than alone a request may take per token; alone is measured first."),
    ] = 3.0,
    max_queue_wait_s: Annotated[
        float, typer.Option(min=0, help="MAX_QUEUE_WAIT_S of the orchestrator; 0: no bound.")
    ] = 0.15,
    leaving: Annotated[float, typer.Option(min=0, max=0.5, help="Share of clients that leave early.")] = 0.05,
    slow: Annotated[float, typer.Option(min=0, max=0.5, help="Share of clients that read slowly.")] = 0.05,
    ttft_ms: opt.TtftTarget = 1000.0,
    tpot_ms: opt.TpotTarget = 50.0,
    num_prompts: opt.NumPrompts = 64,
    output_tokens: Annotated[str, typer.Option(metavar="MIN,MAX", help="Outputs are of lognormal lengths.")] = "16,128",
) -> None:
    """Requests at 0.7, 1, 2 and 4 times what saturates the server, which wait for no answer.

    Who is refused and how, what those who get in wait for, how many wait, and how soon it is over. Exit code 1 when a
    token is not what it is with speculation off, or a request fails otherwise than by a refusal that says when to come
    again.
    """
    options.begin()
    loads = opt.rates(factors, "--factors")
    if not loads:
        raise typer.BadParameter("--factors: needs at least one number")
    shortest, longest = opt.length_range(output_tokens)
    chosen = options.choose_prompts(num_prompts)

    from coppice.lab.bench.load.figures import Targets
    from coppice.lab.bench.overload import SHOWN, OverloadPlan, Visitors, measure_overload

    visitors, targets = Visitors(leaving, slow), Targets(ttft_ms / 1000, tpot_ms / 1000)
    bounds = max_token_ms, token_ratio, max_queue_wait_s
    plan = OverloadPlan(loads, duration, recovery, concurrency, visitors, shortest, targets, *bounds)
    setup = options.setup(chosen, runs, longest, (0.0,))
    options.finish(asyncio.run(measure_overload(setup, plan, options.topology(drafter))), SHOWN)


def overhead(
    out: opt.Out = opt.OUT,
    requests: Annotated[str, typer.Option(metavar="N,N,…", help="Requests at once.")] = "1,16,64",
    nodes: Annotated[int, typer.Option(min=4, max=1024, help="Nodes of each draft.")] = 32,
    passes: Annotated[int, typer.Option(min=1, help="Passes that are planned, at each number of requests.")] = 1000,
    rounds: Annotated[int, typer.Option(min=1, help="About so many rounds, of all requests together.")] = 6400,
    seed: Annotated[int, typer.Option(min=0, help="Of the planner's trees.")] = 0,
) -> None:
    """What the planner costs per pass, and the orchestrator per round between peers that answer at once. No models."""
    levels = opt.numbers(requests, "--requests", least=1)

    from coppice.lab.bench.overhead.suite import SHOWN, OverheadPlan, measure_overhead

    report = measure_overhead(OverheadPlan(levels, nodes, passes, rounds, seed))
    finish(report, SHOWN, out)


def profile(
    options: opt.SuiteOptions,
    drafter: opt.Drafter = opt.DRAFTER,
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts, whose outputs are recorded.")] = 32,
    concurrency: Annotated[str, typer.Option(metavar="N,N,…", help="Requests at once, to fit to.")] = "1,8,64",
    validate: Annotated[
        str, typer.Option(metavar="N,N,…", help="Requests at once, to predict: also writes validation.json.")
    ] = "",
    runs: opt.Runs = 3,
    duration: Annotated[float, typer.Option(min=0.25, help="Seconds of a window.")] = 5.0,
    max_minutes: Annotated[
        float, typer.Option(min=1, help="No run begins that would not end by then; one is made in any case, or none.")
    ] = 40.0,
) -> None:
    """Loads in service, and recorded outputs, for `coppice simulate`; some minutes.

    What passes, drafts and messages take is fitted to plain decoding and to fixed budgets of 2 and 8 nodes. With
    --validate, other policies take turns with these, and the simulator then predicts them.
    """
    options.begin()
    levels = opt.numbers(concurrency, "--concurrency", least=1)
    predicted = opt.numbers(validate, "--validate")

    from coppice.lab.bench.harness.report import write_json
    from coppice.lab.bench.profile.suite import ProfilePlan, ProfileSuite

    plan = ProfilePlan(levels, validation=predicted, num_runs=runs, duration_s=duration, max_s=60 * max_minutes)
    chosen = tuple(opt.choose_prompts(None, num_prompts, options.seed))
    suite = ProfileSuite(options.target, chosen, opt.num_threads(options.threads), plan, seed=options.seed)
    spec = options.topology(drafter)
    report, loads = suite.reports(*asyncio.run(suite.run(spec)))
    # What took minutes to measure is kept whatever comes of the prediction.
    write_json(report, options.out / "profile.json")
    if loads is not None:
        write_json(loads, options.out / "validation.json")
        report["validation"], report["ratios"] = _validated(report, loads)
        write_json(report, options.out / "profile.json")
    for text in report["notes"]:
        typer.echo(text)
    typer.echo(f"wrote {options.out / 'profile.json'}" + (f" and {options.out / 'validation.json'}" if loads else ""))
    for text in loads["mismatches"] if loads else ():
        typer.echo(f"MISMATCH: {text}", err=True)
    if loads and loads["mismatches"]:
        raise typer.Exit(1)


def _validated(report: dict[str, Any], loads: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """The measured loads next to those of the simulator, and how far off it is."""
    from coppice.cli.simulate import print_comparison
    from coppice.lab.simulator.profile import profile_from_json
    from coppice.lab.simulator.scenario import compare, errors

    rows = []
    for row in compare(profile_from_json(report), loads):
        rows.append(row)
        typer.echo(f"simulated {row['name']}", err=True)
    ratios = errors(rows)
    print_comparison(rows, ratios)
    return rows, ratios


def cache(
    options: opt.PromptSuiteOptions,
    drafter: Annotated[
        str, typer.Option(metavar="KIND=DIR|none", help="The drafter next to the cache; none: the cache alone.")
    ] = opt.DRAFTER,
    systems: Annotated[int, typer.Option(min=1, help="System prompts, the beginnings that prompts share.")] = 3,
    endings: Annotated[int, typer.Option(min=1, help="Prompts with each of them.")] = 3,
    max_tokens: opt.MaxTokens = 48,
    runs: opt.Runs = 3,
    temperature: opt.Temperatures = None,
) -> None:
    """The prefix cache under shared system prompts and repeated code: cold, warm, through Redis, and Redis killed.

    The cache with a drafter and alone, one request at a time. Exit code 1 when a request failed, or when a token is
    not what it is with speculation off.
    """
    options.begin()
    spec = options.topology(drafter)

    from coppice.lab.bench.cache import SHOWN, make_workload, measure_on_services, num_pieces, settings

    chosen = options.choose_prompts(needed := num_pieces(systems, endings))
    if len(chosen) < needed:
        raise typer.BadParameter(f"--prompts: {systems} system prompts x {endings} endings are made of {needed}")
    workload = make_workload(chosen, systems, endings)
    temperatures = opt.choose_temperatures(temperature)
    setup = options.setup(workload.prompts, runs, max_tokens, temperatures)
    contenders = settings(one.kind for one in spec.drafters)
    report = asyncio.run(measure_on_services(setup, workload, contenders, spec))
    options.finish(report, SHOWN)
    if report["ratios"]["failed-requests"]:
        raise typer.Exit(1)


def timeline(
    options: opt.PromptSuiteOptions,
    drafter: opt.Drafter = opt.DRAFTER,
    num_prompts: opt.NumPrompts = 4,
    max_tokens: opt.MaxTokens = 96,
    temperature: Annotated[float, typer.Option(min=0, max=100)] = 0.0,
) -> None:
    """Every hop of a round: who was busy, and who waited. Requests one after another, each forced to speculate."""
    opt.require_checkpoint(options.target, "--target")
    spec = options.topology(drafter)
    chosen = options.choose_prompts(num_prompts)

    from coppice.lab.bench.timeline import SHOWN, measure_timeline

    setup = options.setup(chosen, 1, max_tokens, (temperature,))
    options.finish(asyncio.run(measure_timeline(setup, spec)), SHOWN)


def report(
    results: Annotated[
        Path, typer.Option(exists=True, file_okay=False, help="Directory with JSON files of results.")
    ] = Path("results"),
    out: Annotated[Path, typer.Option(help="Directory for the pages.")] = Path("docs/results"),
) -> None:
    """Write a Markdown page for each JSON file of results: machine, versions, command, ratios and rows."""
    from coppice.lab.bench.results_pages import write_pages

    with refusing("--results", OSError, ValueError):
        written = write_pages(results, out)
    typer.echo(f"wrote {len(written)} files to {out}")
