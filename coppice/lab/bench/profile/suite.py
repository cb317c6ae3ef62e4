"""The profile suite: outputs are recorded, loads run in service, and a machine is fitted to them.

Loads that are predicted take turns with those that the machine is fitted to.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc

from coppice.cli.topology import LOCAL, Topology, TopologySpec, running
from coppice.client import Client, RequestFailedError
from coppice.core.tree import TokenTree
from coppice.lab.bench.client import Meter, Mode, Policy, Window, watching
from coppice.lab.bench.environment import describe_machine
from coppice.lab.bench.harness.experiment import BenchmarkError, Samples, in_turn, progress
from coppice.lab.bench.harness.report import Report, document, shown_path, unequal
from coppice.lab.bench.load.loads import ClosedLoad, Workload
from coppice.lab.bench.load.suite import OFF, References, Results, Sample, load_rows, policies, reference_outputs, speed
from coppice.lab.bench.profile.fits import (
    Calibration,
    CpuRecord,
    Records,
    fit_drafts,
    fit_messages,
    fit_passes,
    records_of,
)
from coppice.lab.bench.prompts import Prompt, encoded_prompts
from coppice.lab.bench.services import free_port, kept_events
from coppice.lab.simulator.machine import Contention, Machine
from coppice.lab.simulator.profile import Profile, Trace, profile_to_json
from coppice.net.rpc import open_channel
from coppice.obs.timeline import VARIABLE
from coppice.v1 import drafter_pb2 as pb
from coppice.v1 import drafter_pb2_grpc, sampling_pb2, verifier_pb2, verifier_pb2_grpc
from coppice.wire.convert import tree_from_proto


@dataclass(frozen=True, slots=True)
class Turn:
    """One closed load under one policy; the machine is fitted to it, or it is predicted."""

    load: ClosedLoad
    policy: Policy
    calibrates: bool


@dataclass(frozen=True, slots=True)
class ProfilePlan:
    """So many runs of each load under each policy, as far as `max_s` allows: one run at the least.

    No policy that drafts is the same in both kinds of loads, so that what is predicted was not fitted.
    """

    calibration: tuple[int, ...] = (1, 8, 64)
    budgets: tuple[int, ...] = (2, 8)
    validation: tuple[int, ...] = ()
    num_runs: int = 3
    duration_s: float = 5.0
    max_s: float = 2400.0
    recorded_tokens: int = 128
    recorded_nodes: int = 64

    def turns(self, server_max_nodes: int, run: int) -> Iterator[Turn]:
        """Of one run, in order: few requests first, both kinds side by side.

        Whose turn comes first rotates, so that both kinds see the same hours of the machine.
        """
        fitted = [Policy(OFF, Mode.MODE_OFF)]
        for budget in self.budgets:
            name = Policy("fixed", Mode.MODE_FORCED, min(budget, server_max_nodes)).simulated
            fitted.append(Policy(name, Mode.MODE_FORCED, min(budget, server_max_nodes)))
        for concurrency in sorted({*self.calibration, *self.validation}):
            load = ClosedLoad(concurrency, self.duration_s)
            turns = [Turn(load, policy, True) for policy in fitted if concurrency in self.calibration]
            if concurrency in self.validation:
                turns += [Turn(load, policy, False) for policy in policies(server_max_nodes)]
            yield from in_turn(turns, run)

    def num_turns(self) -> int:
        return self.num_runs * sum(1 for _ in self.turns(max(*self.budgets, 1), 0))


TIMEOUT_S = 120.0
CPU_S = "coppice_orchestrator_cpu_seconds_total"
# Between two readings of it, which take some, too.
INTERVAL_S = 1.0


async def every_position(
    channel: grpc.aio.Channel, prompt: Sequence[int], said: Sequence[int], max_nodes: int, row_multiple: int
) -> list[TokenTree]:
    """A drafter's tree after the first n tokens of a greedy output, for each n but its length.

    Raises BenchmarkError if the drafter failed.
    """
    stub = drafter_pb2_grpc.DrafterServiceStub(channel)
    call = stub.Draft(timeout=TIMEOUT_S)
    sampling = sampling_pb2.SamplingParams(temperature=0.0)
    opening = pb.OpenDraft(prompt_token_ids=prompt, sampling=sampling, max_nodes=max_nodes, row_multiple=row_multiple)
    requests = [pb.DraftRequest(sequence_id=1, open=opening)]
    for position, token in enumerate(said[:-1]):
        outcome = pb.DraftOutcome(base_length=len(prompt) + position, token_ids=[token])
        requests.append(pb.DraftRequest(sequence_id=1, outcome=outcome))
    trees = []
    for request in requests:
        await call.write(request)
        response: Any = await call.read()
        if response is grpc.aio.EOF or response.WhichOneof("event") != "tree":
            raise BenchmarkError(f"a drafter failed: {response}")
        trees.append(tree_from_proto(response.tree.tree))
    call.cancel()
    return trees


def seen(records: Records, spans: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Passes, rounds and drafts per second, the share of rounds with a draft, and the mean time of a pass."""
    parts = [records.within(*span) for span in spans]
    seconds = sum(end - start for start, end in spans)
    passes = [one for part in parts for one in part.passes]
    rounds = [each for one in passes for each in one.rounds]
    return {
        "passes_per_s": round(len(passes) / seconds, 3),
        "pass_ms": round(1000 * sum(one.pass_s for one in passes) / max(1, len(passes)), 3),
        "rounds_per_s": round(len(rounds) / seconds, 3),
        "drafted_share": round(sum(each.num_nodes > 0 for each in rounds) / max(1, len(rounds)), 4),
        "drafts_per_s": round(sum(len(part.drafts) for part in parts) / seconds, 3),
    }


# Windows of one turn in which no token comes, before that is an error.
ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Taken:
    """One turn as it was: the window's sample, and its part that counts by the clock of the records."""

    turn: Turn
    sample: Sample
    start_s: float
    end_s: float


@dataclass(slots=True)
class Measured:
    """Everything that was measured through the services, whose records come when they have stopped."""

    machine: dict[str, Any]
    server_max_nodes: int
    row_multiple: int
    workload: Workload
    references: References
    traces: tuple[Trace, ...]
    taken: list[Taken] = field(default_factory=list)
    # Runs that were made: fewer than planned where time was short.
    num_runs: int = 0


@dataclass(frozen=True, slots=True)
class ProfileSuite:
    """One measurement of a target and a drafter that are served at addresses and record what they do."""

    target: Path
    prompts: tuple[Prompt, ...]
    threads: int
    plan: ProfilePlan = field(default_factory=ProfilePlan)
    min_tokens: int = 32
    seed: int = 0

    async def run(self, spec: TopologySpec) -> tuple[Measured, Records]:
        """Start services that keep their events, measure, and stop them; `spec` has one verifier and one drafter.

        Raises BenchmarkError if a service failed, or not even one run was done in the plan's time.
        """
        with tempfile.TemporaryDirectory() as directory:
            port = await free_port()
            spec = replace(spec, env={VARIABLE: directory}, settings=(("METRICS_PORT", str(port)),))
            meter = Meter((f"http://{LOCAL}:{port}/metrics",), (CPU_S,), "the orchestrator")
            async with running(spec) as topology, watching(meter, INTERVAL_S) as seen:
                measured = await self._measured(topology)
            cpu = [CpuRecord(at_s, counted.total(CPU_S)) for at_s, counted in seen]
            verifier, drafter = (kept_events(Path(directory), service) for service in ("verifier", "drafter"))
            return measured, records_of(verifier, drafter, cpu)

    async def _measured(self, topology: Topology) -> Measured:
        machine, [verifier], [drafter] = describe_machine(), topology.verifier_addresses, topology.drafter_addresses
        try:
            async with Client(topology.address) as client, open_channel(verifier) as channel:
                stub = verifier_pb2_grpc.VerifierServiceStub(channel)
                limits = await stub.Describe(verifier_pb2.VerifierServiceDescribeRequest())
                return await self._measure(client, drafter, max(1, limits.row_multiple), machine)
        except (grpc.aio.AioRpcError, RequestFailedError) as error:
            raise BenchmarkError(f"a service failed: {error}") from error
        except TimeoutError as error:
            raise BenchmarkError(f"not a whole run of all loads was done in {self.plan.max_s:g} s") from error

    async def _measure(self, client: Client, drafter: str, row_multiple: int, machine: dict[str, Any]) -> Measured:
        plan, info, longest = self.plan, await client.model_info(), self.plan.recorded_tokens
        prompt_ids, _ = encoded_prompts(self.target, self.prompts, longest, info.max_context_tokens)
        prompts = tuple(map(tuple, prompt_ids))
        workload = Workload(prompts, min(self.min_tokens, longest), longest, 0.0, self.seed)
        began_s = time.monotonic()
        with progress("profile", 1 + len(prompts) + plan.num_turns()) as step:

            async def run_once() -> None:
                for turn in plan.turns(info.max_nodes, measured.num_runs):
                    taken = await _take(client, workload, measured.num_runs, turn)
                    measured.taken.append(taken)
                    what = f"{turn.policy.name} {turn.load.name}, {speed(taken.sample):.0f} tokens/s"
                    kind = "fitted" if turn.calibrates else "predicted"
                    step(done=f"run {measured.num_runs + 1} of {plan.num_runs}: {what}, {kind}")
                measured.num_runs += 1

            async with asyncio.timeout(plan.max_s):
                references = await reference_outputs(client, workload, Policy(OFF, Mode.MODE_OFF))
                step(done=f"{len(references)} outputs of plain decoding")
                traces: list[Trace] = []
                async with open_channel(drafter) as channel:
                    for prompt, said in zip(prompts, references, strict=True):
                        trees = await every_position(channel, prompt, said, plan.recorded_nodes, row_multiple)
                        traces.append(Trace(len(prompt), said, tuple(trees), prompt))
                        step(done=f"drafts of output {len(traces)} of {len(references)}")
                measured = Measured(machine, info.max_nodes, row_multiple, workload, references, tuple(traces))
                loads_began_s = time.monotonic()
                await run_once()
            run_s = time.monotonic() - loads_began_s
            # A run is begun if it ends in time, going by the first one.
            while measured.num_runs < plan.num_runs and time.monotonic() + run_s <= began_s + plan.max_s:
                await run_once()
        return measured

    def reports(self, measured: Measured, records: Records) -> tuple[Report, Report | None]:
        """The profile, and the loads that are to be predicted as `coppice bench load` reports them, if there are any.

        Raises BenchmarkError if there is too little to fit a machine to.
        """
        by_policy = {taken.turn.policy.name: taken.turn.policy.simulated for taken in measured.taken}
        settings = {"target": shown_path(self.target), "threads": self.threads, **asdict(self.plan), "seed": self.seed}
        settings["num_runs"] = measured.num_runs
        profile = document(
            "profile",
            measured.machine,
            {**settings, "policies": by_policy},
            _rows(measured, records, calibrates=True),
            **profile_to_json(Profile(fit_machine(measured, records), measured.traces)),
        )
        if not self.plan.validation:
            return profile, None
        result, workload = _rows(measured, records, calibrates=False), measured.workload
        fitted = {f"{one.turn.policy.name} {one.turn.load.name}" for one in measured.taken if one.turn.calibrates}
        facts = {
            # Of these loads there were windows of both kinds.
            "fitted": [row["name"] for row in result if row["name"] in fitted],
            "policies": {one.name: one.simulated for one in policies(measured.server_max_nodes)},
            "prompt_tokens": [len(prompt) for prompt in workload.prompts],
            "output_tokens": [workload.min_tokens, workload.max_tokens],
            "server_max_nodes": measured.server_max_nodes,
            "temperature": workload.temperature,
        }
        wrong = unequal(result, "num_compared")
        return profile, document("load", measured.machine, {**settings, **facts}, result, mismatches=wrong)


def fit_machine(measured: Measured, records: Records) -> Machine:
    """From the loads that calibrate alone. Raises BenchmarkError if they are too few."""
    loads = [
        Calibration(one.turn.policy.name != OFF, one.turn.load.concurrency, records.within(one.start_s, one.end_s))
        for one in measured.taken
        if one.turn.calibrates
    ]
    passes = fit_passes(loads, measured.row_multiple, measured.server_max_nodes)
    drafts = fit_drafts(loads)
    messages = fit_messages(loads, passes.costs.after_s(1, 1))
    contention = Contention(passes.pass_per_draft, drafts.draft_factor, messages.orchestrator_factor)
    return Machine(
        passes.costs, drafts.costs, messages.message_s, contention, passes.noise, orchestrator=messages.orchestrator
    )


async def _take(client: Client, workload: Workload, run: int, turn: Turn) -> Taken:
    """One window, or the first of a few in which a token came: a machine may be busy with other things.

    Raises BenchmarkError if requests failed, or no token came in any.
    """
    error = ""
    for _ in range(ATTEMPTS):
        window = Window(client, turn.policy)
        # Of the window's clock, by that of the records.
        began_s = time.monotonic() - window.now()
        span = await turn.load.drive(window, workload, run)
        sample = Sample(turn.load, turn.policy.name, run, span, window.answers())
        if speed(sample) > 0:
            return Taken(turn, sample, began_s + span.start_s, began_s + span.end_s)
        error = next((answer.error for answer in sample.answers if answer.error), "")
        if error:
            break
    raise BenchmarkError(f"{turn.policy.name} {turn.load.name}: {error or 'no token came'}")


def _rows(measured: Measured, records: Records, *, calibrates: bool) -> list[dict[str, Any]]:
    """As `coppice bench load` has them, with what the services saw."""
    taken = [one for one in measured.taken if one.turn.calibrates == calibrates]
    contenders = list({one.turn.policy.name: one.turn.policy for one in taken}.values())
    results = Results(Samples(one.sample for one in taken), tuple(contenders))
    found = load_rows(results, measured.references)
    for row in found:
        spans = [
            (one.start_s, one.end_s)
            for one in taken
            if (one.turn.policy.name, one.turn.load.name) == (row["policy"], row["load"])
        ]
        row |= seen(records, spans)
    return found
