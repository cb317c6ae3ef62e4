"""The profile suite from end to end: outputs are recorded, passes and drafts timed, and a machine is made of it."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from rich.progress import TaskID

from benchmarks.contenders import BenchmarkError
from benchmarks.environment import describe_machine, describe_run
from benchmarks.latency import fit_context
from benchmarks.latency_suite import progress_bar, shown
from benchmarks.profile import fits
from benchmarks.profile.contention import BESIDE, measure_contention
from benchmarks.profile.drafter_peer import DrafterPeer, DraftSeen
from benchmarks.profile.fits import ShapeTimes, shape_times
from benchmarks.profile.plain_steps import plain_step_s
from benchmarks.profile.verifier_peer import Known, PassSeen, Shape, VerifierPeer
from benchmarks.prompts import Prompt
from benchmarks.report import machine_remarks
from coppice.client import Client, RequestFailedError
from coppice.rpc import open_channel
from coppice.tokenizer import TargetTokenizer, load_tokenizer_json
from simulator.machine import Machine, VerifierCosts
from simulator.profile import Profile, profile_to_json
from simulator.texts import Trace


@dataclass(frozen=True, slots=True)
class ProfilePlan:
    """What is measured. Other contexts than the first are for what context costs; `recorded_nodes` for the records."""

    contexts: tuple[int, ...] = (256, 64, 768)
    batches: tuple[int, ...] = (1, 4, 16, 64)
    nodes: tuple[int, ...] = (0, 3, 7, 15)
    far: tuple[tuple[int, int], ...] = ((1, 15), (8, 7))
    right: tuple[tuple[int, int], ...] = ((1, 15), (8, 3))
    num_rounds: int = 16
    prompt_sizes: tuple[int, ...] = (64, 160, 320, 480)
    plain_batches: tuple[int, ...] = (1, 8, 32)
    budgets: tuple[int, ...] = (1, 3, 7, 15, 31)
    num_timed_outputs: int = 3
    recorded_tokens: int = 128
    recorded_nodes: int = 64
    contention_rounds: int = 80

    def shapes(self) -> Iterator[Shape]:
        """Of passes, each once."""
        near = self.contexts[0]
        for batch in self.batches:
            for nodes in self.nodes:
                yield Shape(batch, nodes, near)
        for batch, nodes in (*self.far, *self.right):
            if batch not in self.batches or nodes not in self.nodes:
                yield Shape(batch, nodes, near)
        for batch, nodes in self.right:
            yield Shape(batch, nodes, near, right=True)
        for context in self.contexts[1:]:
            for batch, nodes in self.far:
                yield Shape(batch, nodes, context)


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where services are."""

    orchestrator: str
    verifier: str
    drafter: str


@dataclass(slots=True)
class Measured:
    """Samples of everything, as far as they have been taken."""

    times: list[ShapeTimes] = field(default_factory=list)
    passes: list[list[PassSeen]] = field(default_factory=list)
    prompts: list[PassSeen] = field(default_factory=list)
    rounds: list[DraftSeen] = field(default_factory=list)
    first: list[DraftSeen] = field(default_factory=list)
    plain_steps_s: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProfileSuite:
    """One measurement of a target and a drafter that are served at addresses."""

    target: Path
    prompts: tuple[Prompt, ...]
    threads: int
    plan: ProfilePlan = ProfilePlan()

    async def run(self, addresses: Addresses) -> dict[str, Any]:
        """Measure and return the report.

        Raises:
            BenchmarkError: a service failed.
        """
        machine = describe_machine()
        verifier_channel, drafter_channel = open_channel(addresses.verifier), open_channel(addresses.drafter)
        try:
            async with Client(addresses.orchestrator) as client:
                peers = VerifierPeer(verifier_channel), DrafterPeer(drafter_channel)
                profile, measured = await self._measure(client, *peers)
        except (grpc.aio.AioRpcError, RequestFailedError) as error:
            raise BenchmarkError(f"a service failed: {error}") from error
        finally:
            await asyncio.gather(verifier_channel.close(), drafter_channel.close())
        return self._document(profile, measured, machine)

    async def _measure(self, client: Client, verifier: VerifierPeer, drafter: DrafterPeer) -> tuple[Profile, Measured]:
        plan, limits = self.plan, await verifier.describe()
        prompts = self._encoded(limits.max_context_tokens)
        shapes = list(plan.shapes())
        measured = Measured()
        with progress_bar() as progress:
            total = 3 * len(prompts) + len(shapes) + len(plan.prompt_sizes) + len(plan.plain_batches)
            step: TaskID = progress.add_task("profile", total=total)
            advance = partial(progress.advance, step)
            known = []
            for prompt in prompts:
                known.append((await verifier.decode(prompt, plan.recorded_tokens))[0])
                advance()
            traces = []
            for one in known:
                traces.append(await self._record(drafter, one, max(1, limits.row_multiple)))
                advance()
            for number, one in enumerate(known):
                await self._time_drafts(drafter, one, measured, counts=number < plan.num_timed_outputs)
                advance()
            texts = await _texts(verifier, prompts, plan)
            for shape in shapes:
                passes = await verifier.run(texts[shape.context], shape, plan.num_rounds)
                times = shape_times(shape, passes)
                if times is not None:
                    measured.times.append(times)
                    measured.passes.append(passes)
                advance()
            for size in plan.prompt_sizes:
                for repeat in range(3):
                    salt = f"profile {size} {repeat}"
                    measured.prompts += (await verifier.decode(_prompt(prompts, size), 1, salt))[1]
                advance()
            for batch in plan.plain_batches:
                measured.plain_steps_s[batch] = await plain_step_s(client, texts[plan.contexts[0]], batch)
                advance()
            contention = await measure_contention(verifier, drafter, texts[plan.contexts[0]], plan.contention_rounds)
        draft_costs = fits.fit_drafts(measured.rounds, measured.first)
        message_s = statistics.median(one.answer_s - one.draft_s for one in measured.rounds) / 2
        costs = self._verifier_costs(measured, max(1, limits.row_multiple), limits.max_nodes)
        noise = round(fits.fit_noise(measured.passes), 4)
        return Profile(Machine(costs, draft_costs, message_s, contention, noise), tuple(traces)), measured

    async def _record(self, drafter: DrafterPeer, known: Known, row_multiple: int) -> Trace:
        drafts = await drafter.every_position(known, self.plan.recorded_nodes, row_multiple)
        return Trace(len(known.prompt), known.said, tuple(draft.tree for draft in drafts))

    async def _time_drafts(self, drafter: DrafterPeer, known: Known, measured: Measured, *, counts: bool) -> None:
        """First drafts of every prompt; rounds of some, under every budget."""
        for budget in self.plan.budgets if counts else self.plan.budgets[:1]:
            drafts = await drafter.rounds(known, budget)
            measured.first.append(drafts[0])
            measured.rounds += drafts[1:] if counts else []

    def _verifier_costs(self, measured: Measured, row_multiple: int, max_nodes: int) -> VerifierCosts:
        near = self.plan.contexts[0]
        if not any(one.shape.context == near and not one.shape.right for one in measured.times):
            raise BenchmarkError("no pass had all its sequences: the verifier was too busy to measure")
        fit = fits.fit_passes(measured.times, near, row_multiple)
        costs = VerifierCosts(
            fit.passes,
            context=near,
            row_context_s=fit.row_context_s,
            sequence_s=fit.sequence_s,
            prompt_token_s=fits.fit_prompts(measured.prompts, fit.passes.seconds[0]),
            gap_token_s=fits.fit_committed(measured.times),
            row_multiple=row_multiple,
            max_nodes=max_nodes,
        )
        steps = measured.plain_steps_s
        passes_s = [fit.passes.at(batch) + fit.sequence_s * (batch - 1) for batch in steps]
        gaps = [max(0.0, step - pass_s) for step, pass_s in zip(steps.values(), passes_s, strict=True)]
        gap_s, sequence_s = fits.line(list(steps), gaps)
        # Each sequence of these steps committed one token.
        return _with_gap(costs, gap_s, max(0.0, sequence_s - costs.gap_token_s))

    def _encoded(self, max_context_tokens: int) -> list[list[int]]:
        most = max(self.plan.recorded_tokens, max(self.plan.contexts)) + 1
        if most >= max_context_tokens:
            raise BenchmarkError(f"the profile needs a context beyond {most} tokens; this is {max_context_tokens}")
        tokenizer = TargetTokenizer(load_tokenizer_json(self.target))
        encoded = [tokenizer.encode(prompt.text) for prompt in self.prompts]
        return fit_context(encoded, self.plan.recorded_tokens, max_context_tokens)[0]

    def _document(self, profile: Profile, measured: Measured, machine: dict[str, Any]) -> dict[str, Any]:
        rows = [
            {
                "name": f"{one.shape.batch}x{one.shape.nodes}{'-right' if one.shape.right else ''}@{one.shape.context}",
                **asdict(one.shape),
                "pass_ms": round(1000 * one.pass_s, 4),
                "gap_ms": round(1000 * one.gap_s, 4),
                "num_passes": one.num_passes,
            }
            for one in measured.times
        ]
        return {
            "suite": "profile",
            "rows": rows,
            "ratios": {},
            "plain_step_ms": {str(batch): round(1000 * step, 4) for batch, step in measured.plain_steps_s.items()},
            **profile_to_json(profile),
            "notes": machine_remarks(machine),
            "settings": {"target": shown(self.target), "threads": self.threads, **asdict(self.plan)},
            **describe_run(machine),
        }


async def _texts(verifier: VerifierPeer, prompts: Sequence[Sequence[int]], plan: ProfilePlan) -> dict[int, Known]:
    """For each context a prompt of that length, computed already, and its output as far as rounds may commit."""
    longest = 1 + max(plan.num_rounds * shape.step for shape in plan.shapes())
    texts = {}
    for context in plan.contexts:
        length = max(longest, 1 + plan.contention_rounds)
        texts[context] = (await verifier.decode(_prompt(prompts, context), length + max(*plan.nodes, BESIDE.nodes)))[0]
    return texts


def _prompt(prompts: Sequence[Sequence[int]], length: int) -> list[int]:
    """So many tokens of all prompts one after another."""
    tokens = [token for prompt in prompts for token in prompt]
    if len(tokens) < length:
        raise BenchmarkError(f"all prompts together have {len(tokens)} tokens, fewer than {length}")
    return tokens[:length]


def _with_gap(costs: VerifierCosts, gap_s: float, gap_sequence_s: float) -> VerifierCosts:
    return replace(costs, gap_s=gap_s, gap_sequence_s=gap_sequence_s)
