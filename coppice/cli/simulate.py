"""`coppice simulate`: the planner on measured curves, for loads and fleets larger than this machine."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coppice.cli.bench.options import length_range, numbers, rates
from coppice.cli.options import refusing

if TYPE_CHECKING:
    from coppice.lab.bench.harness.tables import Row
    from coppice.lab.simulator.loads import Load
    from coppice.lab.simulator.policies import Policy
    from coppice.lab.simulator.profile import Profile
    from coppice.lab.simulator.scenario import Scenario

PROFILE = Path(__file__).resolve().parents[2] / "results" / "profile.json"
MAX_REQUESTS = 4096
REQUESTS = "1,2,4,8,16,32,64"
POLICIES = ("off", "fixed=4", "fixed=15", "planner")


def simulate(
    profile: Annotated[Path, typer.Option(help="What `coppice bench profile` measured.")] = PROFILE,
    verifiers: Annotated[int, typer.Option(min=1, max=1024)] = 1,
    drafters: Annotated[int, typer.Option(min=1, max=4096, help="All together.")] = 1,
    requests: Annotated[str, typer.Option(metavar="N,N,…", help="Requests at once.")] = REQUESTS,
    arrivals_per_s: Annotated[
        str, typer.Option(metavar="R,R,…", help="Requests that arrive at random, instead of so many at once.")
    ] = "",
    policy: Annotated[
        list[str] | None, typer.Option(metavar="off|fixed=N|planner", help="Repeatable. Default: off, 4, 15, planner.")
    ] = None,
    drafter_speed: Annotated[float, typer.Option(min=0.001, help="How many times as fast drafters are.")] = 1.0,
    verifier_speed: Annotated[float, typer.Option(min=0.001, help="How many times as fast verifiers are.")] = 1.0,
    separate_machines: Annotated[
        bool, typer.Option("--separate-machines", help="Drafters take no time from verifiers.")
    ] = False,
    prompt_tokens: Annotated[int, typer.Option(min=0, help="Of every prompt; 0 for those of the records.")] = 0,
    output_tokens: Annotated[str, typer.Option(metavar="MIN,MAX", help="Outputs are of random lengths.")] = "32,128",
    max_nodes: Annotated[int, typer.Option(min=1, max=1024, help="The planner's limit, as MAX_NODES has it.")] = 15,
    duration: Annotated[float, typer.Option(min=0.25, help="Seconds that are simulated, after a warm-up.")] = 10.0,
    seed: Annotated[int, typer.Option(help="Of lengths, arrivals and noise.")] = 0,
    against: Annotated[
        Path | None,
        typer.Option(help="A load.json: simulate its closed loads instead, and say how far off that is."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
    out: Annotated[Path | None, typer.Option(help="Directory for simulate.json.")] = None,
) -> None:
    """Throughput and latency that a fleet would have, and how many drafters a verifier needs.

    The orchestrator's own planner and drafting run in a model of verifiers and drafters whose times were measured;
    texts are recorded outputs. Nothing is started, and the same seed gives the same answer.
    """
    from coppice.lab.simulator.profile import ProfileError, read_profile

    if not profile.is_file():
        raise typer.BadParameter(
            f"there is no file {profile}: `coppice bench profile` writes one", param_hint="--profile"
        )
    with refusing("--profile", ProfileError):
        measured = read_profile(profile)
    if against is not None:
        report = _compared(measured, against, seed, shows=not as_json)
    else:
        machine = measured.machine.scaled(verifier_speed, drafter_speed)
        machine = machine.separated() if separate_machines else machine
        wanted = replace(measured, machine=machine)
        scenario = _scenario(wanted, (verifiers, drafters), prompt_tokens, output_tokens, max_nodes, seed)
        loads = _loads(requests, arrivals_per_s, duration, seed)
        report = _answered(scenario, _policies(policy), loads, shows=not as_json)
        report["settings"] |= {
            "drafter_speed": drafter_speed,
            "verifier_speed": verifier_speed,
            "separate_machines": separate_machines,
        }
    if as_json:
        typer.echo(json.dumps(report, ensure_ascii=False))
    if out is not None:
        _write(report, out / "simulate.json", says=not as_json)


def _answered(scenario: Scenario, policies: Sequence[Policy], loads: Sequence[Load], *, shows: bool) -> dict[str, Any]:
    rows = _with_progress(scenario.rows(policies, loads), len(policies) * len(loads))
    if shows:
        from coppice.lab.bench.simulated import ANSWERS, show

        show([ANSWERS], rows)
    workload, fleet = scenario.workload, scenario.fleet
    settings = {
        "verifiers": fleet.verifiers,
        "drafters": fleet.drafters,
        "max_nodes": scenario.max_nodes,
        "prompt_tokens": list(workload.prompt_tokens),
        "output_tokens": [workload.min_tokens, workload.max_tokens],
        "seed": scenario.seed,
    }
    return {"suite": "simulate", "rows": rows, "ratios": {}, "settings": settings}


def _compared(profile: Profile, path: Path, seed: int, *, shows: bool) -> dict[str, Any]:
    from coppice.lab.simulator.scenario import ValidationError, compare, errors, read_load_report

    with refusing("--against", ValidationError):
        report = read_load_report(path)
    closed = sum(row["part"] == "closed" for row in report["rows"])
    rows = _with_progress(compare(profile, report, seed), closed)
    ratios = errors(rows)
    if shows:
        print_comparison(rows, ratios)
    return {"suite": "simulate", "rows": rows, "ratios": ratios, "settings": {"against": path.name, "seed": seed}}


def print_comparison(rows: Sequence[Row], ratios: Mapping[str, float]) -> None:
    """Print a line per measured row, and the errors."""
    from coppice.lab.bench.simulated import COMPARISON, show
    from coppice.lab.simulator.scenario import ERROR

    sizes = f"median {ratios[ERROR]:.1%}, largest {ratios[f'{ERROR}.max']:.1%}" if ratios else ""
    show(COMPARISON, rows, *([f"Absolute relative error: {sizes}"] if sizes else []))


def _scenario(
    profile: Profile, sizes: tuple[int, int], prompt_tokens: int, output_tokens: str, max_nodes: int, seed: int
) -> Scenario:
    from coppice.lab.simulator.deployment import Fleet
    from coppice.lab.simulator.loads import Workload
    from coppice.lab.simulator.scenario import Scenario

    prompts = (prompt_tokens,) if prompt_tokens else ()
    workload = Workload(profile.traces, *length_range(output_tokens), prompts, seed)
    return Scenario(profile.machine, workload, Fleet(*sizes), max_nodes=max_nodes, seed=seed)


def _loads(requests: str, arrivals_per_s: str, duration_s: float, seed: int) -> list[Load]:
    from coppice.lab.simulator.loads import ClosedLoad, PoissonLoad

    if arrivals := rates(arrivals_per_s, "--arrivals-per-s", below=math.inf):
        return [PoissonLoad(rate, duration_s, seed) for rate in arrivals]
    return [ClosedLoad(count, duration_s) for count in numbers(requests, "--requests", MAX_REQUESTS, least=1)]


def _policies(names: Sequence[str] | None) -> list[Policy]:
    from coppice.lab.simulator.policies import Policy

    with refusing("--policy", ValueError):
        return [Policy.parse(name) for name in dict.fromkeys(names or POLICIES)]


def _with_progress(rows: Iterator[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    from rich.console import Console
    from rich.progress import track

    return list(track(rows, "simulating", count, console=Console(stderr=True), transient=True))


def _write(report: dict[str, Any], path: Path, *, says: bool) -> None:
    from coppice.lab.bench.environment import describe_machine, describe_run
    from coppice.lab.bench.harness.report import write_json

    # What is printed is the same each time; where it was computed is for the file.
    write_json({**report, **describe_run(describe_machine())}, path)
    if says:
        typer.echo(f"wrote {path}")
