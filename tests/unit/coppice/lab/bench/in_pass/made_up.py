"""Batches that are made up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from coppice.cli.topology import DrafterSpec
from coppice.completion import Completion, OriginCounts, Speculation, Timing, Usage
from coppice.lab.bench.counters import Counters
from coppice.lab.bench.harness.experiment import Samples
from coppice.lab.bench.in_pass.suite import (
    NODES,
    PASS_S,
    PASSES,
    PRUNABLE_ROWS,
    PRUNABLE_S,
    PRUNED_NODES,
    PRUNED_PASSES,
    ROW_PASSES,
    ROWS,
    BatchOutcome,
    BatchSample,
    Measured,
)
from coppice.lab.bench.in_pass.variants import Group, InPass

SMALL_LM = DrafterSpec("small-lm", "models/small-lm")
EVERYTHING = InPass(SMALL_LM, "/a", 3, "/h", (1, 2, 3, 5), (1, 2), (8, 16), (1, 4))
NUM_TOKENS = 120


@dataclass(frozen=True, slots=True)
class MadeUp:
    """A batch: tokens per round and per second, their id, rounds of re-drafts, and what the verifier counted."""

    tau: float = 1.0
    speed: float = 100.0
    token: int = 1
    redraft_rounds: int = 0
    passes: Counters = field(default_factory=Counters)


def counts(
    passes: float, pass_s: float, rows: float, nodes: float = 0, removed: float = 0, pruned: float = 0
) -> Counters:
    """What a verifier counted."""
    values = {PASSES: passes, PASS_S: pass_s, ROWS: rows, ROW_PASSES: passes}
    values |= {NODES: nodes, PRUNED_NODES: removed, PRUNED_PASSES: pruned}
    return Counters({(name, ()): value for name, value in values.items()})


def compared(rows: float, whole_s: float, pruned_s: float) -> Counters:
    """What a verifier counted that ran passes of so many rows both ways."""
    values = {(PRUNABLE_ROWS, "no"): rows, (PRUNABLE_ROWS, "yes"): rows}
    values |= {(PRUNABLE_S, "no"): whole_s, (PRUNABLE_S, "yes"): pruned_s}
    return Counters({(name, (("pruned", pruned),)): value for (name, pruned), value in values.items()})


def measured(group: Group, batches: Mapping[str, Sequence[MadeUp]], temperatures: Sequence[float] = (0.0,)) -> Measured:
    """A group whose contenders did this run by run, alike at all temperatures; the others did as plain decoding."""
    num_runs = max(map(len, batches.values()), default=1)
    samples = [
        BatchSample(variant.contender, temperature, run, 0, _outcome(done, group.batch_size))
        for temperature in temperatures
        for run in range(num_runs)
        for variant in group.variants
        for done in [batches.get(variant.contender, [MadeUp()] * num_runs)[run]]
    ]
    return Measured(group, Samples(samples), ("",) * len(group.variants))


def _outcome(done: MadeUp, batch_size: int) -> BatchOutcome:
    rounds = round(NUM_TOKENS / done.tau)
    origins = {"redraft": OriginCounts(done.redraft_rounds, 0, 0)} if done.redraft_rounds else {}
    stats = Speculation(rounds, rounds_drafted_by_depth=(rounds,), redraft_tokens=done.redraft_rounds, origins=origins)
    tokens = (done.token,) * NUM_TOKENS
    completion = Completion("", 0, "", tokens, "length", None, Usage(), stats, Timing())
    return BatchOutcome((completion,) * batch_size, batch_size * NUM_TOKENS / done.speed, done.passes)
