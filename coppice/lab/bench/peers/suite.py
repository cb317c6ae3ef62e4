"""Other engines and us in turn: one stream over kinds of prompts, and many requests at once."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from coppice.cli.child import ChildError
from coppice.cli.topology import Topology
from coppice.client import Client
from coppice.lab.bench import comparison
from coppice.lab.bench.client import (
    ASSISTED,
    OFF,
    ON,
    TRANSFORMERS,
    Contender,
    Mode,
    Policy,
    Server,
    Task,
    connected,
    model_info,
)
from coppice.lab.bench.comparison import Sample, Setup, take
from coppice.lab.bench.divergences import Divergence, find_divergences
from coppice.lab.bench.environment import describe_machine
from coppice.lab.bench.harness.experiment import BenchmarkError, Ratios, Samples, progress
from coppice.lab.bench.harness.plots import Panel, bars
from coppice.lab.bench.harness.report import Report, Row, Shown, document, shown_path, unequal
from coppice.lab.bench.harness.tables import Table
from coppice.lab.bench.peers.figures import APART, Measured, absences, kind_rows, peer_ratios
from coppice.lab.bench.peers.server import LLAMA_CPP, OPENVINO, Engine, exported, serving
from coppice.lab.bench.precisions import Precision, served_in
from coppice.lab.bench.throughput import IDENTICAL, measure_batches, throughput_rows
from coppice.lab.bench.transformers_baseline import (
    LOOKUP,
    ContinuousBatching,
    Generate,
    load_model,
    quiet_transformers,
    top_two_gap,
)
from orchestrator.prefix_cache.guesses import SOURCE as CACHE
from orchestrator.request.rounds import PROMPT_LOOKUP

PEERS = (TRANSFORMERS, LLAMA_CPP.name, OPENVINO.name)
CONTINUOUS = "transformers-continuous"
# What llama.cpp speculates with besides a draft model. Its ngram-mod is left out: it finds again what it answered to an
# earlier request, and prompts come again, run after run.
NGRAMS = ("ngram-simple", "ngram-cache")
DRAFT_MODEL = "draft-model"
# OpenVINO's own reader of GGUF files knows neither f32 nor bf16.
OPENVINO_TYPE = "q8_0"
# Enough to see that a contender can do what it is asked for.
TRIAL_TOKENS = 4
NOT_ASKED_FOR = "not asked for (--peers)"
NO_SMALL_LM = "no small LM is made for the target"


@dataclass(frozen=True, slots=True)
class EngineArm:
    """Another engine with the target's matrices of a type of GGUF files, plain or with speculation of its own."""

    engine: Engine
    gguf: str
    speculation: str = ""

    @property
    def name(self) -> str:
        """Name of the contender."""
        return " ".join(filter(None, (f"{self.engine.name}-{self.gguf}", self.speculation)))


def engine_arms(types: Sequence[str]) -> Iterator[EngineArm]:
    """What is measured besides transformers; llama.cpp's has matrices of these types."""
    for gguf in types:
        yield from (EngineArm(LLAMA_CPP, gguf, one) for one in ("", *NGRAMS, DRAFT_MODEL))
    yield from (EngineArm(OPENVINO, OPENVINO_TYPE, one) for one in ("", PROMPT_LOOKUP))


@dataclass(frozen=True, slots=True)
class PeersPlan:
    """Which peers take part, precisions of ours and llama.cpp, and requests at once."""

    peers: Collection[str] = PEERS
    precisions: Sequence[Precision] = ()
    concurrency: Sequence[int] = ()


@dataclass(slots=True)
class Lineup:
    """Contenders that take part, each tried out first, and why others do not."""

    stack: contextlib.AsyncExitStack
    trial: Sequence[Task]
    contenders: list[Contender] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    speculative: list[str] = field(default_factory=list)

    async def add(self, contender: Contender, *, speculative: bool = False) -> None:
        """Raises BenchmarkError if it cannot complete the trial's tasks."""
        for task in self.trial:
            await take(contender, [task], 0)
        self.contenders.append(contender)
        if speculative:
            self.speculative.append(contender.name)


@dataclass(frozen=True, slots=True)
class PeersSuite:
    """Peers and us on one target; `small_lm` is what other engines can draft with, if there is one."""

    setup: Setup
    drafters: Sequence[str]
    small_lm: Path | None
    plan: PeersPlan

    async def run(self, topology: Topology) -> Report:
        """Measure on a running topology and return the report.

        Raises BenchmarkError if a contender failed after its trial, or one of ours in it; ChildError if a service of
        ours did not start.
        """
        machine, setup = describe_machine(), self.setup
        quiet_transformers()
        torch.set_num_threads(setup.threads)
        kinds = [prompt.category or "other" for prompt in setup.prompts]
        async with contextlib.AsyncExitStack() as stack:
            client = await connected(stack, topology.address)
            info = await model_info(client)
            target = load_model(setup.target, getattr(torch, info.dtype))
            most = getattr(target.config, "max_position_embeddings", info.max_context_tokens)
            prompt_ids, num_cut = setup.encoded(min(most, info.max_context_tokens))
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            options = {"threads": setup.threads, "context": max(map(len, prompt_ids)) + setup.plan.max_tokens}
            trial = [Task(tuple(prompt_ids[0]), TRIAL_TOKENS, heat, 0) for heat in setup.plan.temperatures]
            alone, at_once = Lineup(stack, trial), Lineup(stack, trial[:1])
            await self._add_ours(alone, client, topology, info.dtype)
            await self._add_transformers(alone, target)
            for arm in engine_arms([one.gguf for one in self.plan.precisions]):
                await self._add_engine(alone, arm, directory, options)
            batches = [range(at, at + 1) for at in range(len(prompt_ids))]
            total = len(alone.contenders) * len(batches) * len(setup.plan.temperatures) * setup.plan.num_runs
            with progress("peers", total) as advance:
                samples = await comparison.measure(alone.contenders, prompt_ids, setup.plan, batches, advance)
            if self.plan.concurrency:
                at_once.contenders += alone.contenders[:2]
                await self._add_at_once(at_once, target, directory, options)
            spec_bench = [ids for ids, kind in zip(prompt_ids, kinds, strict=True) if kind not in APART]
            crowds = await self._measure_at_once(at_once.contenders, spec_bench)
        settings = {
            **setup.settings(prompt_ids, num_cut),
            "dtype": info.dtype,
            "small_lm": None if self.small_lm is None else shown_path(self.small_lm),
            "peers": [name for name in PEERS if name in self.plan.peers],
            "precisions": [one.name for one in self.plan.precisions],
            "concurrency": list(self.plan.concurrency),
        }
        measured = Measured(samples, crowds, kinds, alone.speculative)
        return peers_report(machine, settings, measured, alone, at_once, target)

    async def _add_ours(self, alone: Lineup, client: Client, topology: Topology, dtype: str) -> None:
        """Speculation off, what a request gets that asks for nothing, each source alone, and other precisions."""
        await alone.add(Server(client, Policy(OFF, Mode.MODE_OFF)))
        await alone.add(Server(client, Policy(ON, Mode.MODE_AUTO)))
        for source in (*self.drafters, PROMPT_LOOKUP, CACHE):
            await alone.add(Server(client, Policy(f"{ON} {source}", Mode.MODE_FORCED, sources=(source,))))
        for one in self.plan.precisions:
            if one.dtype != getattr(torch, dtype):
                own = await connected(alone.stack, await served_in(topology, one))
                await alone.add(Server(own, one.policy))

    async def _add_transformers(self, alone: Lineup, target: PreTrainedModel) -> None:
        threads = self.setup.threads
        if TRANSFORMERS not in self.plan.peers:
            alone.missing |= dict.fromkeys((TRANSFORMERS, LOOKUP, ASSISTED), NOT_ASKED_FOR)
            return
        await alone.add(Generate(target, threads))
        await alone.add(Generate(target, threads, lookup=True), speculative=True)
        if self.small_lm is None:
            alone.missing[ASSISTED] = NO_SMALL_LM
        else:
            await alone.add(Generate(target, threads, load_model(self.small_lm, target.dtype)), speculative=True)

    async def _add_engine(self, lineup: Lineup, arm: EngineArm, directory: Path, options: Row, name: str = "") -> None:
        name = name or arm.name
        if arm.engine.name not in self.plan.peers:
            lineup.missing[name] = NOT_ASKED_FOR
        elif arm.speculation == DRAFT_MODEL and self.small_lm is None:
            lineup.missing[name] = NO_SMALL_LM
        elif arm.engine.interpreter() is None:
            lineup.missing[name] = arm.engine.not_installed
        else:
            try:
                files = {"model": self.setup.target}
                if arm.speculation == DRAFT_MODEL and self.small_lm is not None:
                    files["draft"] = self.small_lm
                paths = {key: str(exported(model, directory, arm.gguf)) for key, model in files.items()}
                own = {**options, **paths, "speculation": arm.speculation}
                server = await lineup.stack.enter_async_context(serving(arm.engine, name, own))
                await lineup.add(server, speculative=bool(arm.speculation))
            except (BenchmarkError, ChildError) as error:
                lineup.missing[name] = " ".join(str(error).removeprefix(f"{name}: ").split())

    async def _add_at_once(self, at_once: Lineup, target: PreTrainedModel, directory: Path, options: Row) -> None:
        """transformers' continuous batching, and llama.cpp with as many slots as there are requests at most."""
        if TRANSFORMERS in self.plan.peers:
            await at_once.add(ContinuousBatching(target, self.setup.threads, options["context"]))
        else:
            at_once.missing[CONTINUOUS] = NOT_ASKED_FOR
        arm = EngineArm(LLAMA_CPP, "bf16" if target.dtype == torch.bfloat16 else "f32")
        slots = {**options, "parallel": max(self.plan.concurrency)}
        await self._add_engine(at_once, arm, directory, slots, LLAMA_CPP.name)

    async def _measure_at_once(
        self, contenders: Sequence[Contender], prompts: Sequence[Sequence[int]]
    ) -> Samples[Sample]:
        plan, taken = self.setup.plan, list[Sample]()
        with progress("at once", len(contenders) * len(self.plan.concurrency) * plan.num_runs) as advance:
            for size in self.plan.concurrency:
                taken += await measure_batches(contenders, prompts, plan, size, range(plan.num_runs), advance)
        return Samples(taken)


def peers_report(
    machine: Row, settings: Row, measured: Measured, alone: Lineup, at_once: Lineup, target: PreTrainedModel
) -> Report:
    """The report; greedy outputs of all contenders are compared with those of transformers."""
    samples = measured.alone
    names = [one.name for one in alone.contenders if one.name != TRANSFORMERS]
    gap = cache(lambda ids: top_two_gap(target, ids))
    dtype = settings["dtype"]
    apart = find_divergences(samples, names, lambda ids: gap(tuple(ids)), dtype)
    found = [row | _ties(row, apart) | {"missing": None} for row in comparison.rows(samples, alone.contenders)]
    crowd = throughput_rows(measured.at_once, at_once.contenders)
    ratios = Ratios.of(peer_ratios(measured))
    missing = alone.missing | at_once.missing
    best = {f"T={heat:g}": measured.best_speculative(heat) for heat in samples.each("temperature")}
    notes = [
        *(f"The best speculative peer at {heat} is {name}." for heat, name in best.items() if name),
        *absences(ratios.values, missing),
        *comparison.remarks(found),
    ]
    absent = [{"name": name, "contender": name, "missing": reason} for name, reason in missing.items()]
    wrong = comparison.mismatches(samples) + unequal(
        [row for row in crowd if row["contender"] == ON], "num_requests", IDENTICAL
    )
    more = {
        "kinds": kind_rows(measured),
        "at_once": {row["name"]: row for row in crowd},
        "arms": {one.name: one.note for one in (*alone.contenders, *at_once.contenders)},
    }
    return document("peers", machine, settings, [*found, *absent], ratios, notes, wrong, **more)


def _ties(row: Row, apart: Sequence[Divergence]) -> Row:
    """Of a row's greedy outputs that are not those of transformers, how many rounding alone explains."""
    if row["num_identical_to_transformers"] is None:
        return {"num_near_ties": None, "num_apart": None}
    near = [one.near_tie for one in apart if one.contender == row["contender"]]
    return {"num_near_ties": sum(near), "num_apart": len(near) - sum(near)}


def _is_plotted(row: Mapping[str, Any]) -> bool:
    """Ours off and with all sources, and peers; sources alone are in the table."""
    return not row["contender"].startswith(f"{ON} ")


SHOWN = Shown(
    tables=(
        Table(
            "Tokens per second of one stream, median of the runs",
            "tokens_per_s speed_over_off mean_acceptance_length num_identical_to_transformers num_near_ties num_apart "
            "repeated_4grams missing",
        ),
        Table(
            "By kind of prompts; intervals are bootstrapped over prompts",
            "num_prompts tokens_per_s mean_acceptance_length speed_over_off speed_over_llama_cpp repeated_4grams",
            "{kind} {contender} T={temperature:g}",
            source="kinds",
        ),
        Table(
            "Tokens per second of so many requests at once",
            "tokens_per_s",
            "{contender}",
            across="concurrency",
            source="at_once",
        ),
    ),
    panels=(
        Panel(
            "By kind of prompts, T={:g}",
            "tokens_per_s",
            "{kind}",
            "{contender}",
            bars,
            where=_is_plotted,
            by="temperature",
            source="kinds",
        ),
    ),
    line="{num_prompts} prompts x {max_tokens} tokens x {num_runs} runs, {threads} threads, {dtype}. "
    "Plain ratios are T=0, those at other temperatures say so.",
    panels_per_row=1,
)
