"""Time of one pass of the target by rows and context: ours over a token tree, transformers' own forward, in turn.

Where strict mode is offered, ours is measured in strict and in fast mode: what exactness costs is their ratio.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from coppice.checkpoints.hf_cache import cache_argument
from coppice.core.tree import EMPTY_TREE, TokenTree
from coppice.lab.bench.environment import describe_machine
from coppice.lab.bench.harness.experiment import BenchmarkError, Ratios, in_turn, progress
from coppice.lab.bench.harness.plots import Panel, lines
from coppice.lab.bench.harness.report import Report, Shown, document, shown_path
from coppice.lab.bench.harness.tables import Row, Table
from coppice.lab.bench.transformers_baseline import load_model, quiet_transformers
from verifier_svc.config import VerifierConfig
from verifier_svc.engine.kv_cache import SequenceCache
from verifier_svc.engine.pass_plan import SequenceRows
from verifier_svc.model.loading import load_probed_target
from verifier_svc.model.target_model import TargetModel

# Up to here the price of a further row is stated: trees of one request are not larger on a CPU.
SLOPE_ROWS = 32

NOT_STRICT = "Strict mode is not what this machine's verifier takes by itself: its cost was not measured."

Pass: TypeAlias = Callable[[Sequence[int]], None]


def _cell(row: Row) -> str:
    ours, theirs, ratio = f"{row['coppice_ms']:.2f}", f"{row['transformers_ms']:.2f}", f"{row['ratio']:.2f}"
    if row["fast_ms"] is None:
        return f"{ours} / {theirs} ({ratio})"
    return f"{ours} / {row['fast_ms']:.2f} / {theirs} ({ratio}, {row['strict_over_fast']:.2f})"


SHOWN = Shown(
    tables=(
        Table(
            "Milliseconds per pass by tokens before: ours over a tree, transformers' over a chain (ratio), "
            "with strict mode: strict / fast / transformers (strict:transformers, strict:fast)",
            {"ms": _cell},
            label="{rows}",
            across="context",
        ),
    ),
    panels=tuple(
        Panel(
            f"{name}: by tokens before",
            lines,
            "rows",
            f"{name}_ms",
            "{context}",
            "rows",
            "ms per pass",
            log_x=True,
            log_y=True,
        )
        for name in ("coppice", "transformers")
    ),
    ratio_title="",
)


@dataclass(frozen=True, slots=True)
class PassesPlan:
    """What is measured: every number of rows behind every context, `repeats` times."""

    contexts: tuple[int, ...] = (64, 256, 1024)
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    repeats: int = 15
    seed: int = 0


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Median milliseconds of a pass over `rows` rows behind `context` tokens, and median ratios of two in turn.

    `coppice_ms` is the mode that a server takes by itself, and `ratio` that mode's time over transformers'. Where that
    is strict mode, `fast_ms` and `strict_over_fast` are there, too.
    """

    context: int
    rows: int
    coppice_ms: float
    transformers_ms: float
    ratio: float
    fast_ms: float | None = None
    strict_over_fast: float | None = None


def measure_passes(target_dir: Path, plan: PassesPlan, threads: int, device: str = "auto") -> Report:
    """Measure and return the report. `threads` is for each contender; 0 leaves both to their own choice.

    Both run on `device`, as the verifier's DEVICE has it.

    Raises:
        BenchmarkError: the checkpoint cannot be used, or its context or vocabulary is too small for the plan.
    """
    machine = describe_machine()
    quiet_transformers()
    plain = load_model(target_dir)
    config = VerifierConfig.from_env({}, model=str(target_dir), threads=threads, device=device)
    try:
        ours, info = load_probed_target(config)
        fast = load_probed_target(config.model_copy(update={"exactness": "fast"}))[0] if info.exact else None
    except (OSError, ValueError) as error:
        raise BenchmarkError(f"cannot load {target_dir}: {error}") from error
    if max(plan.contexts) + max(plan.rows) > info.max_context_tokens:
        raise BenchmarkError(f"--context and --rows go beyond the target's {info.max_context_tokens} tokens")
    if max(plan.rows) > info.vocab_size:
        raise BenchmarkError(f"--rows: at most {info.vocab_size}, so that all tokens of a tree differ")
    plain.to(ours.device, next(ours.model.parameters()).dtype)  # type: ignore[arg-type]
    times = _measure(plain, ours, fast, plan, info.vocab_size, threads)
    settings = {"target": shown_path(target_dir), "threads": threads, "device": str(ours.device), **asdict(plan)}
    notes = [
        f"A further row after {context} tokens: {slope['coppice']:.3f} ms, transformers {slope['transformers']:.3f}."
        for context in plan.contexts
        if (slope := slopes(times, context))
    ]
    return document(
        "passes",
        machine,
        settings,
        [asdict(entry) for entry in times],
        Ratios(pass_ratios(times), {}),
        notes=[*notes, *([] if fast else [NOT_STRICT])],
        ms_per_further_row={str(context): slopes(times, context) for context in plan.contexts},
    )


def pass_ratios(times: Sequence[PassTimes]) -> dict[str, float]:
    """A pass of one row over transformers' by context, and strict over fast mode by context and rows."""
    alone = {f"pass/transformers.context-{entry.context}": entry.ratio for entry in times if entry.rows == 1}
    strict = {
        f"strict/fast.context-{entry.context}.rows-{entry.rows}": entry.strict_over_fast
        for entry in times
        if entry.strict_over_fast is not None
    }
    return {**alone, **strict}


def slopes(times: Sequence[PassTimes], context: int) -> dict[str, float]:
    """Milliseconds that a further row costs behind a context, by least squares up to `SLOPE_ROWS` rows."""
    chosen = [entry for entry in times if entry.context == context and entry.rows <= SLOPE_ROWS]
    if len(chosen) < 2:
        return {}
    rows = [entry.rows for entry in chosen]
    return {
        "coppice": float(np.polyfit(rows, [entry.coppice_ms for entry in chosen], 1)[0]),
        "transformers": float(np.polyfit(rows, [entry.transformers_ms for entry in chosen], 1)[0]),
    }


def _measure(
    plain: PreTrainedModel, ours: TargetModel, fast: TargetModel | None, plan: PassesPlan, vocab_size: int, threads: int
) -> list[PassTimes]:
    generator = np.random.default_rng(plan.seed)
    default_threads = threads or torch.get_num_threads()
    targets = [ours] if fast is None else [ours, fast]
    times = []
    with progress("contexts", len(plan.contexts)) as advance:
        for context in plan.contexts:
            prompt = generator.integers(0, vocab_size, context).tolist()
            caches = [SequenceCache(target.cache, context + max(plan.rows)) for target in targets]
            # One seed, so that all see trees of the same shapes.
            passes = [
                tree_pass(target, cache, prompt, np.random.default_rng(plan.seed))
                for target, cache in zip(targets, caches, strict=True)
            ]
            with _threads(default_threads):
                passes.append(_with_threads(default_threads, plain_pass(plain, prompt)))
            for rows in plan.rows:
                tokens = [generator.choice(vocab_size, rows, replace=False).tolist() for _ in range(plan.repeats + 1)]
                times.append(_pass_times(context, rows, timed_in_turn(passes, tokens)))
            for cache in caches:
                cache.release()
            advance()
    return times


def timed_in_turn(passes: Sequence[Pass], tokens: Sequence[Sequence[int]]) -> list[list[float]]:
    """Milliseconds of every pass over each of `tokens` but the first, which is a warm-up [tokens - 1, passes]."""
    times = []
    for number, some in enumerate(tokens):
        ms = [0.0] * len(passes)
        for which in in_turn(range(len(passes)), number):
            started = time.perf_counter()
            passes[which](some)
            ms[which] = (time.perf_counter() - started) * 1e3
        times.append(ms)
    return times[1:]


def _pass_times(context: int, rows: int, times: Sequence[Sequence[float]]) -> PassTimes:
    """Of `times` [repeats, passes]: ours, where there is one ours in fast mode, transformers'."""
    ours, *fast, theirs = zip(*times, strict=True)
    return PassTimes(
        context,
        rows,
        coppice_ms=statistics.median(ours),
        transformers_ms=statistics.median(theirs),
        ratio=_median_ratio(ours, theirs),
        fast_ms=statistics.median(fast[0]) if fast else None,
        strict_over_fast=_median_ratio(ours, fast[0]) if fast else None,
    )


def _median_ratio(some: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(one / other for one, other in zip(some, others, strict=True))


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """So many threads for torch; afterwards as before, which our own target relies on."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _with_threads(count: int, some_pass: Pass) -> Pass:
    def run(tokens: Sequence[int]) -> None:
        with _threads(count):
            some_pass(tokens)

    return run


@torch.inference_mode()
def plain_pass(model: PreTrainedModel, prompt: Sequence[int]) -> Pass:
    """transformers' forward of some tokens, as a chain, behind a prompt that its own cache holds."""
    cache = DynamicCache(config=model.config)
    device = next(model.parameters()).device
    options: dict[str, Any] = {cache_argument(model.forward): cache, "use_cache": True}
    model(input_ids=torch.tensor([list(prompt)], device=device), **options)

    @torch.inference_mode()
    def run(tokens: Sequence[int]) -> None:
        input_ids = torch.tensor([list(tokens)], device=device)
        model(input_ids=input_ids, **options).logits.float().cpu()
        cache.crop(-len(tokens))

    return run


def tree_pass(target: TargetModel, cache: SequenceCache, prompt: Sequence[int], generator: np.random.Generator) -> Pass:
    """Our pass over a root and a tree of random shape behind a prompt in the paged cache; nothing is accepted."""
    target.forward(target.plan([SequenceRows(cache, list(prompt), wants_logits=False)]))
    cache.keep(range(len(prompt)))

    def run(tokens: Sequence[int]) -> None:
        size = len(tokens) - 1
        parents = tuple(int(generator.integers(-1, node)) if node else -1 for node in range(size))
        tree = TokenTree(tuple(tokens[1:]), parents, (0.0,) * size) if size else EMPTY_TREE
        target.forward(target.plan([SequenceRows(cache, tokens[:1], tree)]))

    return run
