"""Time of one pass of the target by rows and context: ours over a token tree, transformers' own forward, in turn.

Where strict mode is offered, ours is measured in strict and in fast mode: what exactness costs is their ratio. Where
layers are compiled, the products of a pass are measured by themselves: what is not products is the rest of its time.
"""

from __future__ import annotations

import contextlib
import operator
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
from coppice.lab.bench.harness.plots import Panel
from coppice.lab.bench.harness.report import Report, Row, Shown, document, shown_path
from coppice.lab.bench.harness.tables import Table
from coppice.lab.bench.transformers_baseline import load_model, quiet_transformers
from verifier_svc.config import VerifierConfig
from verifier_svc.engine.kv_cache import SequenceCache
from verifier_svc.engine.pass_plan import SequenceRows
from verifier_svc.model.compiled_products import products_of
from verifier_svc.model.loading import load_probed_target
from verifier_svc.model.target_model import TargetModel

# Up to here the price of a further row is stated: trees of one request are not larger on a CPU.
SLOPE_ROWS = 32
# Tokens before passes of some rows that are compared with a pass of one.
ROWS_CONTEXT = 256

NOT_STRICT = "Strict mode is not what this machine's verifier takes by itself: its cost was not measured."

Pass: TypeAlias = Callable[[Sequence[int]], None]


SHOWN = Shown(
    tables=(
        Table(
            "Milliseconds per pass by tokens before: ours over a tree, transformers' over a chain, ours in fast mode, "
            "products of ours",
            "coppice_ms transformers_ms ratio fast_ms strict_over_fast products_ms",
            label="{rows}",
            across="context",
        ),
    ),
    panels=tuple(
        Panel(f"{name}: by tokens before", f"{name}_ms", "rows", "{context}", log_x=True, log_y=True)
        for name in ("coppice", "transformers")
    ),
    ratio_title="",
)


@dataclass(frozen=True, slots=True)
class PassesPlan:
    """What is measured: every number of rows after every context, `repeats` times."""

    contexts: tuple[int, ...] = (64, 256, 1024)
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    repeats: int = 15
    seed: int = 0


def measure_passes(
    target_dir: Path, plan: PassesPlan, threads: int, device: str = "auto", dtype: str = "auto"
) -> Report:
    """Measure and return the report. `threads` is for each contender; 0 leaves both to their own choice.

    Both compute in the numbers that the target is served in, which `dtype` chooses.

    Both run on `device`, as the verifier's DEVICE has it. Rows have median milliseconds of passes over `rows` rows
    after `context` tokens, and median ratios of two in turn: `coppice_ms` is the mode that a server takes by itself,
    `ratio` that mode's time over transformers'. Where it is strict mode, `fast_ms` and `strict_over_fast` are there,
    and where layers are compiled `products_ms`.

    Raises BenchmarkError if the checkpoint cannot be used, or its context or vocabulary is too small for the plan.
    """
    machine = describe_machine()
    quiet_transformers()
    plain = load_model(target_dir)
    config = VerifierConfig.from_env({}, model=str(target_dir), threads=threads, device=device, dtype=dtype)
    try:
        ours, info = load_probed_target(config)
        fast = load_probed_target(config.model_copy(update={"exactness": "fast"}))[0] if info.exact else None
    except (OSError, ValueError) as error:
        raise BenchmarkError(f"cannot load {target_dir}: {error}") from error
    if max(plan.contexts) + max(plan.rows) > info.max_context_tokens:
        raise BenchmarkError(f"--context and --rows go beyond the target's {info.max_context_tokens} tokens")
    if max(plan.rows) > info.vocab_size:
        raise BenchmarkError(f"--rows: at most {info.vocab_size}, so that all tokens of a tree differ")
    plain.to(ours.device, getattr(torch, info.dtype))  # type: ignore[arg-type]
    rows = _measure(plain, [ours] if fast is None else [ours, fast], plan, info.vocab_size, threads)
    settings = {"target": shown_path(target_dir), "threads": threads, "device": str(ours.device)}
    settings |= {"dtype": info.dtype, **asdict(plan)}
    prices = {str(context): slopes(rows, context) for context in plan.contexts}
    notes = [
        f"A further row after {context} tokens: {slope['coppice']:.3f} ms, transformers {slope['transformers']:.3f}."
        for context, slope in prices.items()
        if slope
    ]
    notes += [] if fast else [NOT_STRICT]
    ratios = Ratios(pass_ratios(rows), {})
    return document("passes", machine, settings, rows, ratios, notes=notes, ms_per_further_row=prices)


def pass_ratios(rows: Sequence[Row]) -> dict[str, float]:
    """A pass of one row over transformers' by context, passes of more rows over one, and strict over fast mode.

    `rowsN/rows1`, and the share of a pass that is not products, are after `ROWS_CONTEXT` tokens.
    """
    alone = {f"pass/transformers.context-{row['context']}": row["ratio"] for row in rows if row["rows"] == 1}
    sizes = {row["rows"]: row["coppice_ms"] for row in rows if row["context"] == ROWS_CONTEXT}
    more = {f"rows{size}/rows1": ms / sizes[1] for size, ms in sizes.items() if size > 1 and 1 in sizes}
    strict = {
        f"strict/fast.context-{row['context']}.rows-{row['rows']}": row["strict_over_fast"]
        for row in rows
        if row["strict_over_fast"] is not None
    }
    rest = {
        f"not-products/pass.rows-{row['rows']}": row["not_products"]
        for row in rows
        if row["context"] == ROWS_CONTEXT and row["not_products"] is not None
    }
    return {**alone, **more, **rest, **strict}


def slopes(rows: Sequence[Row], context: int) -> dict[str, float]:
    """Milliseconds that a further row costs after a context, by least squares up to `SLOPE_ROWS` rows."""
    chosen = [row for row in rows if row["context"] == context and row["rows"] <= SLOPE_ROWS]
    if len(chosen) < 2:
        return {}
    sizes = [row["rows"] for row in chosen]
    return {
        name: float(np.polyfit(sizes, [row[f"{name}_ms"] for row in chosen], 1)[0])
        for name in ("coppice", "transformers")
    }


def _measure(
    plain: PreTrainedModel, targets: Sequence[TargetModel], plan: PassesPlan, vocab_size: int, threads: int
) -> list[Row]:
    generator = np.random.default_rng(plan.seed)
    count = threads or torch.get_num_threads()
    products = products_of(targets[0])
    rows: list[Row] = []
    with progress("contexts", len(plan.contexts)) as advance:
        for context in plan.contexts:
            prompt = generator.integers(0, vocab_size, context).tolist()
            caches = [SequenceCache(target.cache, context + max(plan.rows)) for target in targets]
            # One seed, so that all see trees of the same shapes.
            passes = [
                tree_pass(target, cache, prompt, np.random.default_rng(plan.seed))
                for target, cache in zip(targets, caches, strict=True)
            ]
            with _threads(count):
                theirs = plain_pass(plain, prompt)
            passes.append(_threads(count)(theirs))
            if products is not None:
                passes.append(lambda tokens: products(len(tokens)))
            for size in plan.rows:
                tokens = [generator.choice(vocab_size, size, replace=False).tolist() for _ in range(plan.repeats + 1)]
                rows.append(
                    {
                        "context": context,
                        "rows": size,
                        **_times(timed_in_turn(passes, tokens), len(targets) > 1, products is not None),
                    }
                )
            for cache in caches:
                cache.release()
            advance()
    return rows


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


def _times(times: Sequence[Sequence[float]], has_fast: bool, has_products: bool) -> Row:
    """Of `times` [repeats, passes]: ours, ours in fast mode if there is one, transformers', our products."""
    columns = iter(zip(*times, strict=True))
    ours = next(columns)
    fast = next(columns) if has_fast else None
    theirs = next(columns)
    products = next(columns) if has_products else None
    return {
        "coppice_ms": statistics.median(ours),
        "transformers_ms": statistics.median(theirs),
        "ratio": statistics.median(map(operator.truediv, ours, theirs)),
        "fast_ms": statistics.median(fast) if fast else None,
        "strict_over_fast": statistics.median(map(operator.truediv, ours, fast)) if fast else None,
        "products_ms": statistics.median(products) if products else None,
        "not_products": 1 - statistics.median(map(operator.truediv, products, ours)) if products else None,
    }


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """So many threads for torch; afterwards as before, which our own target relies on."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@torch.inference_mode()
def plain_pass(model: PreTrainedModel, prompt: Sequence[int]) -> Pass:
    """transformers' forward of some tokens, as a chain, after a prompt that its own cache holds."""
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
    """Our pass over a root and a tree of random shape after a prompt in the paged cache; nothing is accepted."""
    target.forward(target.plan([SequenceRows(cache, list(prompt), wants_logits=False)]))
    cache.keep(range(len(prompt)))

    def run(tokens: Sequence[int]) -> None:
        size = len(tokens) - 1
        parents = tuple(int(generator.integers(-1, node)) if node else -1 for node in range(size))
        tree = TokenTree(tuple(tokens[1:]), parents, (0.0,) * size) if size else EMPTY_TREE
        target.forward(target.plan([SequenceRows(cache, tokens[:1], tree)]))

    return run
