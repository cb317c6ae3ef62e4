"""Strict mode under fire: whatever runs beside a sequence, its tokens and its logits' bits are those it gets alone.

Episode after episode draws limits at random (cache, rows, chunks, sequences, nodes) and lets a crowd of requests join,
leave, get drafts, lose their blocks and be cancelled, until enough tokens have been compared and every kind of event
has happened. The engine, the scheduler, the cache and the model are the real ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from unittest import mock

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from tests.fuzz.references import (
    GREEDY,
    MAX_OUTPUT,
    MAX_PROMPT,
    LogitRows,
    Reference,
    Witness,
    draw_references,
    generated,
)
from tests.unit.verifier_svc.crowd import Crowd
from verifier_svc.config import VerifierConfig
from verifier_svc.engine import scheduler
from verifier_svc.engine.kv_cache import BLOCK_SIZE
from verifier_svc.engine.scheduler import SchedulerLimits
from verifier_svc.engine.sequence import SequenceKey
from verifier_svc.extras.pruning.pace import ON
from verifier_svc.model.loading import load_probed_target
from verifier_svc.model.precision import DtypeName
from verifier_svc.model.target_model import TargetInfo
from verifier_svc.stream.events import Event, OutcomeEvent

# Further apart than rounding in single precision gets two logits: transformers has to choose the same token.
NEAR_TIE_GAP = 1e-4
# What must have happened at least once for a run to mean anything.
EVENTS = (
    "tokens",
    "greedy tokens",
    "sampled tokens",
    "nodes",
    "accepted",
    "leaves",
    "cancels",
    "cancelled while preempted",
    "preemptions for want of blocks",
    "forced preemptions",
    "recomputed tokens",
    "prefix hits",
    "resumed",
    "ended by a stop string",
    "passes",
    "parts of prompts",
    "episodes with few rows",
)
# And with an early head, with an adapter, and where rope factors change at a length.
PRUNED = "pruned nodes"
MASKS = "masks"
RESTARTS = "restarts at the rope boundary"
_JOINS = 40
_ROWS_WITH_MASKS = 64
_MOST_EPISODES = 500


@dataclass(frozen=True)
class FuzzPlan:
    """How much is compared: at least so many tokens, and so many joins, leaves, cancellations and preemptions."""

    model: Path
    num_tokens: int
    num_changes: int
    num_cases: int
    seed: int = 0
    # Of torch; 0 means what a server has by default, which changes with the rows of a pass.
    threads: int = 0
    # Gap of two logits below which transformers may choose another token.
    near_tie_gap: float = NEAR_TIE_GAP
    events: tuple[str, ...] = EVENTS
    # Of the target, and of transformers.
    dtype: DtypeName = "float32"
    # Directory of a head that prunes every pass that has nodes, or runs it both ways; None without.
    early_head: Path | None = None
    early_pruning: Literal["on", "compare"] = "on"
    # Directory of an adapter whose masks are in as many passes as may have some; None without.
    space_adapter: Path | None = None


class WitnessedCrowd(Crowd):
    """A crowd whose every delivered token is checked down to the bits of the logits that it was chosen from."""

    def __init__(self, witness: Witness, info: TargetInfo, limits: SchedulerLimits, seed: int, max_nodes: int) -> None:
        super().__init__(witness.target, info, limits, seed, max_nodes)
        self._witness = witness
        restart = self.scheduler.restart

        def counted(key: SequenceKey) -> None:
            self.counts[RESTARTS] += 1
            restart(key)

        self.scheduler.restart = counted  # type: ignore[method-assign]

    def _check(self, event: Event) -> None:
        sequence = self._open[event.sequence_id] if isinstance(event, OutcomeEvent) else None
        done = 0 if sequence is None else sequence.num_resumed + len(sequence.tokens)
        super()._check(event)
        if sequence is None or not isinstance(event, OutcomeEvent):
            return
        outcome = event.outcome
        assert isinstance(sequence.case, Reference)
        rows = self._witness.next_rows()[[0, *(1 + node for node in outcome.accepted_nodes)]][: len(outcome.token_ids)]
        expected = sequence.case.logits[done : done + len(outcome.token_ids)]
        assert same_bits(rows, expected), f"logits of sequence {event.sequence_id} at output tokens {done} and after"
        kind = "greedy" if sequence.case.sampling.temperature == 0 else "sampled"
        self.counts[f"{kind} tokens"] += len(outcome.token_ids)


def fuzz(plan: FuzzPlan, tell: Callable[[str], None] = lambda _: None) -> Counter[str]:
    """Run episodes until the plan is fulfilled and return what happened.

    Raises:
        AssertionError: a token, a bit, a block or a sequence is not what it should be; the seed gives it again.
        IncompatibleError: this machine does not offer strict mode.
    """
    generator = np.random.default_rng(plan.seed)
    config = VerifierConfig(
        model=str(plan.model),
        device="cpu",
        exactness="strict",
        threads=plan.threads,
        dtype=plan.dtype,
        early_head="" if plan.early_head is None else str(plan.early_head),
        early_pruning=plan.early_pruning,
        space_adapter="" if plan.space_adapter is None else str(plan.space_adapter),
        redraft_min_probability=0.0,
        redraft_rows=_ROWS_WITH_MASKS,
    )
    target, info = load_probed_target(config)
    witness = Witness(target)
    references = draw_references(witness, info, generator, plan.num_cases)
    counts = compare_with_transformers(plan.model, references, plan.near_tie_gap, plan.dtype)
    tell(f"{len(references)} requests with {sum(len(one.output) for one in references)} tokens alone")
    must_happen = plan.events
    if info.rope_boundary is not None:
        must_happen = (*must_happen, RESTARTS)
    if info.pruning is not None and info.pruning.switch == ON:
        must_happen = (*must_happen, PRUNED)
    if info.redraft is not None:
        must_happen = (*must_happen, MASKS)
    while not _is_enough(counts, plan, must_happen):
        seed = int(generator.integers(2**32))
        counts += episode(witness, info, references, seed)
        counts["episodes"] += 1
        assert counts["episodes"] < _MOST_EPISODES, f"never happened: {', '.join(missing(counts, must_happen))}"
        tell(f"episode {counts['episodes']}: {counts['tokens']} tokens, {changes(counts)} changes")
    return counts


def episode(witness: Witness, info: TargetInfo, references: Sequence[Reference], seed: int) -> Counter[str]:
    """One engine with limits of its own, from empty to empty."""
    generator = np.random.default_rng(seed)
    max_nodes = int(generator.choice([4, 16, 40]))
    enough = -(-(MAX_PROMPT + MAX_OUTPUT + max_nodes) // BLOCK_SIZE)
    limits = SchedulerLimits(
        max_sequences=int(generator.choice([3, 8, 16])),
        max_queued=1000,
        prefill_chunk=int(generator.choice([5, 16, 33, 128, 512])),
        max_rows=int(generator.choice([0, 0, 6, 20, 64])),
        free_rows=0 if info.redraft is None else info.redraft.free_rows,
    )
    # Few recurrent states, if there are any: sequences wait for them, and kept ones replace each other.
    witness.target.set_num_states(int(generator.choice([2, 5, 16])), int(generator.choice([1, 3, 8])))
    witness.target.resize_cache(int(generator.choice([enough, enough + 1, 3 * enough])))
    crowd = WitnessedCrowd(witness, info, limits, seed, max_nodes)
    # A narrow margin lets sequences start that will have to make room for each other.
    margin = int(generator.choice([1, 1, 8, scheduler.MARGIN_TOKENS]))
    with mock.patch.object(scheduler, "MARGIN_TOKENS", margin):
        _run(crowd, references, generator)
    crowd.check_outputs()
    crowd.check_nothing_is_left()
    counts = crowd.counts
    counts["preemptions for want of blocks"] = crowd.engine.scheduler.num_preemptions - counts["forced preemptions"]
    counts[PRUNED] = crowd.engine.counts.num_pruned_nodes
    counts[MASKS], witness.num_masks = witness.num_masks, 0
    counts["recomputed tokens"] = crowd.engine.scheduler.num_recomputed_tokens
    counts["passes"], counts["parts of prompts"] = witness.take_counts()
    counts["episodes with few rows"] = int(limits.max_rows > 0)
    counts["blocks that came back"] = witness.target.cache.num_free_blocks
    counts["blocks"] = witness.target.cache.num_blocks
    return counts


def compare_with_transformers(
    model_dir: Path,
    references: Sequence[Reference],
    near_tie_gap: float = NEAR_TIE_GAP,
    dtype: DtypeName = "float32",
) -> Counter[str]:
    """Every plain greedy reference is what transformers generates, up to the first near-tie that fell otherwise."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype))
    counts: Counter[str] = Counter()
    for reference in references:
        if reference.sampling != GREEDY:
            continue
        tokens, gaps = generated(model, reference.prompt, len(reference.output))
        for token, expected, gap in zip(reference.output, tokens, gaps, strict=True):
            if token != expected:
                assert gap < near_tie_gap, f"transformers says {expected}, not {token}; its best two are {gap} apart"
                counts["near-ties with transformers"] += 1
                break
            counts["tokens that transformers says, too"] += 1
    return counts


def same_bits(one: LogitRows, other: LogitRows) -> bool:
    """Whether two arrays of single precision are the same, signs of zeros included."""
    return bool(np.array_equal(one.view(np.uint32), other.view(np.uint32)))


def changes(counts: Counter[str]) -> int:
    """Joins, leaves, cancellations and preemptions."""
    preemptions = counts["preemptions for want of blocks"] + counts["forced preemptions"]
    return counts["joins"] + counts["leaves"] + counts["cancels"] + preemptions


def missing(counts: Counter[str], must_happen: Sequence[str] = EVENTS) -> list[str]:
    """The kinds of events that have not happened."""
    return [name for name in must_happen if not counts[name]]


def _is_enough(counts: Counter[str], plan: FuzzPlan, must_happen: Sequence[str]) -> bool:
    if counts["tokens"] < plan.num_tokens or changes(counts) < plan.num_changes:
        return False
    return not missing(counts, must_happen)


def _run(crowd: Crowd, references: Sequence[Reference], generator: np.random.Generator) -> None:
    """Let sequences come at random until there were enough, with drafts and disturbances to the end."""
    while crowd.counts["joins"] < _JOINS or crowd.num_live:
        if crowd.counts["joins"] < _JOINS and crowd.num_live < 20 and generator.random() < 0.5:
            reference = references[int(generator.integers(len(references)))]
            resumed = int(generator.integers(len(reference.output))) if generator.random() < 0.2 else 0
            crowd.join(
                reference,
                num_resumed=resumed,
                priority=int(generator.choice([-1, 0, 0, 0, 2])),
                linger_s=float(generator.choice([0.0, 0.0, 3e-4])),
            )
            crowd.counts["resumed"] += resumed > 0
        for _ in range(int(generator.integers(0, 10)) if crowd.num_live else 0):
            crowd.draft()
        if crowd.num_live and generator.random() < 0.02:
            crowd.cancel()
        if generator.random() < 0.02:
            crowd.preempt()
        crowd.turn()
    crowd.finish()
