"""Time of drawing tokens from rows of logits: the verifier's sampler, and its definition in NumPy, in turn.

There is no model: logits are made up, a block of rows at a time as in a pass, and only the draws are timed.
"""

from __future__ import annotations

import operator
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from coppice.core.noise import gumbel
from coppice.core.sampling import SamplingParams
from coppice.core.tree import EMPTY_TREE
from coppice.lab.bench.environment import describe_machine
from coppice.lab.bench.harness.experiment import Ratios, in_turn, progress
from coppice.lab.bench.harness.report import Report, Row, Shown, document
from coppice.lab.bench.harness.tables import Table
from verifier_svc.engine.pass_runner import MAX_LOGIT_BYTES
from verifier_svc.verify.sampler import Logits, RowTable
from verifier_svc.verify.token_choice import TokenChooser

KINDS = {
    "greedy": SamplingParams(),
    "t1": SamplingParams(temperature=1.0),
    "top-p": SamplingParams(temperature=1.0, top_p=0.9),
    "top-k": SamplingParams(temperature=1.0, top_k=50),
    "penalties": SamplingParams(temperature=1.0, repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.2),
}
# Ratios are of passes of this many rows.
QUOTED_ROWS = 64
# Rows that NumPy draws from in its turn, one after another: more would say the same of a row.
_NUMPY_ROWS = 2
_PROMPT_TOKENS = 1000

SHOWN = Shown(
    tables=(
        Table(
            "Milliseconds per row, {threads} threads: the sampler's in a pass of so many rows, and NumPy's",
            "sampler_ms numpy_ms",
            label="{kind}, {rows} rows",
            across="vocab",
        ),
    ),
    ratio_title="",
)


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """Every kind of request at every vocabulary and number of rows, `repeats` times."""

    vocab: tuple[int, ...] = (4096, 49152, 151936, 262144)
    rows: tuple[int, ...] = (1, 16, 64, 256)
    repeats: int = 5
    seed: int = 0


def measure_sampling(plan: SamplingPlan, threads: int) -> Report:
    """Measure and return the report.

    Rows have median milliseconds: `sampler_ms` and `numpy_ms` of drawing from a row, `pass_ms` of drawing from all rows
    of a pass at once, and the median `ratio` of two draws in turn. Tokens that differ are mismatches.
    """
    machine = describe_machine()
    rows: list[Row] = []
    mismatches: list[str] = []
    with progress("vocabularies and rows", len(plan.vocab) * len(plan.rows)) as advance:
        for vocab in plan.vocab:
            for size in plan.rows:
                rows += _measure(vocab, size, plan, threads, mismatches)
                advance()
    quoted = [row for row in rows if row["rows"] == QUOTED_ROWS]
    ratios = {f"{row['kind']}-ms@{row['vocab']}": row["sampler_ms"] for row in quoted}
    ratios |= {f"{row['kind']}/numpy@{row['vocab']}": row["ratio"] for row in quoted}
    return document(
        "sampling",
        machine,
        {"threads": threads, **asdict(plan)},
        rows,
        Ratios(ratios, {}),
        mismatches=mismatches,
    )


def made_up_logits(rows: int, vocab: int, seed: int) -> Logits:
    """Logits [rows, vocab] as a model has them: most tokens hardly likely, and some two dozen that are."""
    generator = np.random.default_rng([seed, rows, vocab])
    logits = generator.standard_normal((rows, vocab), np.float32)
    logits *= 2
    for row in logits:
        row[generator.integers(0, vocab, 24)] += generator.uniform(9, 15, 24).astype(np.float32)
    return logits


def numpy_draw(params: SamplingParams, logits: Logits, position: int, prompt: Sequence[int]) -> int:
    """The first token after a prompt by definition, from a row of logits [vocab]: nothing is said that penalties count.

    Of `KINDS`: bias, lists of tokens and `min_p` are left out.
    """
    scores = logits.copy()
    if params.repetition_penalty != 1:
        seen = np.unique(prompt)
        penalty = np.float32(params.repetition_penalty)
        scores[seen] = np.where(scores[seen] > 0, scores[seen] / penalty, scores[seen] * penalty)
    if params.temperature == 0:
        return int(scores.argmax())
    scaled = scores.astype(np.float64) / params.temperature
    if 0 < params.top_k < scaled.size:
        scaled[scaled < np.partition(scaled, -params.top_k)[-params.top_k]] = -np.inf
    if params.top_p < 1:
        order = np.argsort(-scaled, kind="stable")
        weights = np.exp(scaled[order] - scaled[order[0]])
        # A token stays while the likelier ones together have not reached top_p.
        before = np.cumsum(weights) - weights
        scaled[order[before >= params.top_p * weights.sum()]] = -np.inf
    return int((scaled + gumbel(params.seed, position, 1, scaled.size)[0]).argmax())


def _measure(vocab: int, size: int, plan: SamplingPlan, threads: int, mismatches: list[str]) -> list[Row]:
    """A row for each kind of request."""
    prompt = np.random.default_rng(plan.seed).integers(0, vocab, _PROMPT_TOKENS).tolist()
    # The first turn is a warm-up.
    turns = range(plan.repeats + 1)
    pass_ms = {kind: [0.0 for _ in turns] for kind in KINDS}
    numpy_ms = {kind: [0.0 for _ in turns] for kind in KINDS}
    for first in range(0, size, most := max(1, MAX_LOGIT_BYTES // (4 * vocab))):
        logits = made_up_logits(min(most, size - first), vocab, plan.seed + first)
        few = logits[:_NUMPY_ROWS]
        for kind, params in KINDS.items():
            choosers = [TokenChooser(params, vocab, prompt=prompt) for _ in logits]
            for turn in turns:
                drawn: dict[str, list[int]] = {}
                for which in in_turn(("sampler", "numpy"), turn):
                    started_s = time.perf_counter()
                    if which == "sampler":
                        drawn[which] = _drawn(logits, choosers, turn, threads)
                        pass_ms[kind][turn] += (time.perf_counter() - started_s) * 1e3
                    else:
                        drawn[which] = [numpy_draw(params, row, turn + place, prompt) for place, row in enumerate(few)]
                        numpy_ms[kind][turn] = (time.perf_counter() - started_s) * 1e3 / len(few)
                if drawn["sampler"][: len(few)] != drawn["numpy"]:
                    mismatches.append(f"{kind}, {vocab} tokens, {size} rows, turn {turn}: tokens differ")
    return [
        {
            "kind": kind,
            "vocab": vocab,
            "rows": size,
            "pass_ms": round(statistics.median(ours), 4),
            "sampler_ms": round(statistics.median(ours) / size, 5),
            "numpy_ms": round(statistics.median(theirs), 4),
            "ratio": round(statistics.median(map(operator.truediv, ours, theirs)) / size, 5),
        }
        for kind in KINDS
        for ours, theirs in [(pass_ms[kind][1:], numpy_ms[kind][1:])]
    ]


def _drawn(logits: Logits, choosers: Sequence[TokenChooser], turn: int, threads: int) -> list[int]:
    """Tokens of a block of rows, as a pass draws them; each row is a sequence's, whose next position is its own."""
    table = RowTable()
    for place, chooser in enumerate(choosers):
        table.add(chooser, EMPTY_TREE, place, turn + place)
    table.draw(logits, threads)
    return [int(draws[0, 0]) for draws in table.drawn()]
