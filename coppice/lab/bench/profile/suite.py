"""The profile suite from end to end: outputs are recorded, loads run in service, and a machine is fitted to them.

Loads that are predicted take turns with those that the machine is fitted to.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc

from coppice.client import Client, RequestFailedError
from coppice.core.tokenizer import TargetTokenizer, load_tokenizer_json
from coppice.lab.bench.contenders import BenchmarkError
from coppice.lab.bench.environment import describe_machine, describe_run
from coppice.lab.bench.latency import fit_context
from coppice.lab.bench.latency_suite import progress_bar, shown
from coppice.lab.bench.load.figures import Targets
from coppice.lab.bench.load.measure import References, Sample, reference_outputs
from coppice.lab.bench.load.policies import OFF, Mode, Policy, policies
from coppice.lab.bench.load.rows import mismatches, rows
from coppice.lab.bench.load.samples import Samples, speed
from coppice.lab.bench.load.window import Window
from coppice.lab.bench.load.workload import Workload
from coppice.lab.bench.profile.calibration import Calibration
from coppice.lab.bench.profile.draft_fits import fit_drafts
from coppice.lab.bench.profile.drafter_peer import DrafterPeer, Known
from coppice.lab.bench.profile.message_fits import fit_messages
from coppice.lab.bench.profile.pass_fits import fit_passes
from coppice.lab.bench.profile.plan import ProfilePlan, Turn
from coppice.lab.bench.profile.records import Records, now_s
from coppice.lab.bench.profile.seen import seen
from coppice.lab.bench.prompts import Prompt
from coppice.lab.bench.report import machine_remarks
from coppice.lab.simulator.machine import Contention, Machine
from coppice.lab.simulator.profile import Profile, profile_to_json
from coppice.lab.simulator.texts import Trace
from coppice.net.rpc import open_channel
from coppice.v1 import inference_pb2, verifier_pb2, verifier_pb2_grpc

# Windows of one turn in which no token comes, before that is an error.
ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where services are."""

    orchestrator: str
    verifier: str
    drafter: str


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

    async def run(self, addresses: Addresses) -> Measured:
        """Measure.

        Raises:
            BenchmarkError: a service failed, or not even one run was done in the plan's time.
        """
        machine = describe_machine()
        try:
            async with Client(addresses.orchestrator) as client, _channel(addresses.verifier) as verifier:
                stub = verifier_pb2_grpc.VerifierServiceStub(verifier)
                limits = await stub.Describe(verifier_pb2.VerifierServiceDescribeRequest())
                return await self._measure(client, addresses.drafter, max(1, limits.row_multiple), machine)
        except (grpc.aio.AioRpcError, RequestFailedError) as error:
            raise BenchmarkError(f"a service failed: {error}") from error
        except TimeoutError as error:
            raise BenchmarkError(f"not a whole run of all loads was done in {self.plan.max_s:g} s") from error

    async def _measure(self, client: Client, drafter: str, row_multiple: int, machine: dict[str, Any]) -> Measured:
        plan, info = self.plan, await client.model_info()
        workload = self._workload(info)
        began_s = time.monotonic()
        with progress_bar() as progress:
            total = 1 + len(workload.prompts) + plan.num_turns()
            step = progress.add_task("profile", total=total)

            def advance(done: str) -> None:
                progress.console.print(done, markup=False, highlight=False)
                progress.advance(step)

            async with asyncio.timeout(plan.max_s):
                references = await reference_outputs(client, workload, Policy(OFF, Mode.MODE_OFF))
                advance(f"{len(references)} outputs of plain decoding")
                traces = await self._record(drafter, workload, references, row_multiple, advance)
                measured = Measured(machine, info.max_nodes, row_multiple, workload, references, traces)
                loads_began_s = time.monotonic()
                await self._run_once(client, measured, advance)
            run_s = time.monotonic() - loads_began_s
            # A run is begun if it ends in time, going by the first one.
            while measured.num_runs < plan.num_runs and time.monotonic() + run_s <= began_s + plan.max_s:
                await self._run_once(client, measured, advance)
        return measured

    async def _run_once(self, client: Client, measured: Measured, advance: Callable[[str], None]) -> None:
        run, plan = measured.num_runs, self.plan
        for turn in plan.turns(measured.server_max_nodes, run):
            taken = await _take(client, measured.workload, run, turn)
            measured.taken.append(taken)
            kind = "fitted" if turn.calibrates else "predicted"
            name, tokens_per_s = f"{turn.policy.name} {turn.load.name}", speed(taken.sample)
            advance(f"run {run + 1} of {plan.num_runs}: {name}, {tokens_per_s:.0f} tokens/s, {kind}")
        measured.num_runs += 1

    async def _record(
        self,
        drafter: str,
        workload: Workload,
        references: References,
        row_multiple: int,
        advance: Callable[[str], None],
    ) -> tuple[Trace, ...]:
        traces = []
        async with _channel(drafter) as channel:
            peer = DrafterPeer(channel)
            for prompt, said in zip(workload.prompts, references, strict=True):
                trees = await peer.every_position(Known(prompt, said), self.plan.recorded_nodes, row_multiple)
                traces.append(Trace(len(prompt), said, tuple(trees), prompt))
                advance(f"drafts of output {len(traces)} of {len(references)}")
        return tuple(traces)

    def _workload(self, info: inference_pb2.GetModelInfoResponse) -> Workload:
        longest = self.plan.recorded_tokens
        limit = info.max_context_tokens
        if longest >= limit:
            raise BenchmarkError(f"the profile needs a context beyond {longest} tokens; this is {limit}")
        tokenizer = TargetTokenizer(load_tokenizer_json(self.target))
        encoded = [tokenizer.encode(prompt.text) for prompt in self.prompts]
        prompts = fit_context(encoded, longest, limit)[0]
        return Workload(tuple(map(tuple, prompts)), min(self.min_tokens, longest), longest, 0.0, self.seed)

    def reports(self, measured: Measured, records: Records) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """The profile, and the loads that are to be predicted as `coppice bench load` reports them, if there are any.

        Raises:
            BenchmarkError: there is too little to fit a machine to.
        """
        by_policy = {taken.turn.policy.name: taken.turn.policy for taken in measured.taken}
        machine = fit_machine(measured, records)
        run_facts = describe_run(measured.machine)
        settings = {"target": shown(self.target), "threads": self.threads, **asdict(self.plan), "seed": self.seed}
        settings["num_runs"] = measured.num_runs
        profile = {
            "suite": "profile",
            "rows": _rows(measured, records, calibrates=True),
            "ratios": {},
            **profile_to_json(Profile(machine, measured.traces)),
            "notes": machine_remarks(measured.machine),
            "settings": {**settings, "policies": {name: policy.simulated for name, policy in by_policy.items()}},
            **run_facts,
        }
        if not self.plan.validation:
            return profile, None
        result = _rows(measured, records, calibrates=False)
        workload = measured.workload
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
        loads = {
            "suite": "load",
            "rows": result,
            "ratios": {},
            "notes": machine_remarks(measured.machine),
            "mismatches": mismatches(result),
            "settings": {**settings, **facts},
            **run_facts,
        }
        return profile, loads


def fit_machine(measured: Measured, records: Records) -> Machine:
    """From the loads that calibrate alone.

    Raises:
        BenchmarkError: they are too few.
    """
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

    Raises:
        BenchmarkError: requests failed, or no token came in any.
    """
    error = ""
    for _ in range(ATTEMPTS):
        window = Window(client, turn.policy)
        # Of the window's clock, by that of the records.
        began_s = now_s() - window.now()
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
    samples = Samples([one.sample for one in taken], contenders, Targets())
    found = rows(samples, measured.references)
    for row in found:
        spans = [
            (one.start_s, one.end_s)
            for one in taken
            if (one.turn.policy.name, one.turn.load.name) == (row["policy"], row["load"])
        ]
        row |= seen(records, spans)
    return found


@asynccontextmanager
async def _channel(address: str) -> AsyncIterator[grpc.aio.Channel]:
    channel = open_channel(address)
    try:
        yield channel
    finally:
        await channel.close()
