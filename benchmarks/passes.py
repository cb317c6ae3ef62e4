"""Time of one pass of the target by rows and context: ours over a token tree, transformers' own forward, in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from rich.progress import track
from transformers import DynamicCache, PreTrainedModel

from benchmarks.contenders import BenchmarkError
from benchmarks.environment import describe_command, describe_commit, describe_machine, describe_versions
from benchmarks.latency_suite import shown
from benchmarks.report import machine_remarks
from benchmarks.transformers_baseline import load_model, quiet_transformers
from coppice.tree import EMPTY_TREE, TokenTree
from verifier_svc.config import VerifierConfig
from verifier_svc.kv_cache import SequenceCache
from verifier_svc.loading import load_probed_target
from verifier_svc.pass_plan import SequenceRows
from verifier_svc.target_model import TargetModel

# Up to here the price of a further row is stated: trees of one request are not larger on a CPU.
SLOPE_ROWS = 32

Pass: TypeAlias = Callable[[Sequence[int]], None]


@dataclass(frozen=True, slots=True)
class PassesPlan:
    """What is measured: every number of rows behind every context, `repeats` times."""

    contexts: tuple[int, ...] = (64, 256, 1024)
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    repeats: int = 15
    seed: int = 0


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Median milliseconds of a pass over `rows` rows behind `context` tokens, and the median ratio of two in turn."""

    context: int
    rows: int
    coppice_ms: float
    transformers_ms: float
    ratio: float


def measure_passes(target_dir: Path, plan: PassesPlan, threads: int) -> dict[str, Any]:
    """Measure and return the report. `threads` is for each contender; 0 leaves both to their own choice.

    Raises:
        BenchmarkError: the checkpoint cannot be used, or its context or vocabulary is too small for the plan.
    """
    machine = describe_machine()
    quiet_transformers()
    plain = load_model(target_dir)
    try:
        ours, info = load_probed_target(VerifierConfig(model=str(target_dir), threads=threads))
    except (OSError, ValueError) as error:
        raise BenchmarkError(f"cannot load {target_dir}: {error}") from error
    if max(plan.contexts) + max(plan.rows) > info.max_context_tokens:
        raise BenchmarkError(f"--context and --rows go beyond the target's {info.max_context_tokens} tokens")
    if max(plan.rows) > info.vocab_size:
        raise BenchmarkError(f"--rows: at most {info.vocab_size}, so that all tokens of a tree differ")
    plain.to(ours.device, next(ours.model.parameters()).dtype)  # type: ignore[arg-type]
    times = _measure(plain, ours, plan, info.vocab_size, threads)
    commit = describe_commit()
    return {
        "suite": "passes",
        "rows": [asdict(entry) for entry in times],
        "ratios": {f"pass/transformers.context-{entry.context}": entry.ratio for entry in times if entry.rows == 1},
        "ms_per_further_row": {str(context): slopes(times, context) for context in plan.contexts},
        "notes": machine_remarks(machine),
        "settings": {"target": shown(target_dir), "threads": threads, "device": str(ours.device), **asdict(plan)},
        "machine": machine,
        "versions": describe_versions(),
        "command": describe_command(),
        "commit": commit["revision"],
        "dirty": commit["dirty"],
    }


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
    plain: PreTrainedModel, ours: TargetModel, plan: PassesPlan, vocab_size: int, threads: int
) -> list[PassTimes]:
    generator = np.random.default_rng(plan.seed)
    default_threads = threads or torch.get_num_threads()
    times = []
    for context in track(plan.contexts, "contexts"):
        prompt = generator.integers(0, vocab_size, context).tolist()
        torch.set_num_threads(default_threads)
        transformers_pass = plain_pass(plain, prompt)
        cache = SequenceCache(ours.cache, context + max(plan.rows))
        our_pass = tree_pass(ours, cache, prompt, generator)
        for rows in plan.rows:
            tokens = [generator.choice(vocab_size, rows, replace=False).tolist() for _ in range(plan.repeats + 1)]
            pairs = []
            for number, some in enumerate(tokens):
                pair = [0.0, 0.0]
                # Who begins alternates: the second finds the caches that the first has left.
                for which in (0, 1) if number % 2 else (1, 0):
                    torch.set_num_threads(default_threads)
                    started = time.perf_counter()
                    (our_pass, transformers_pass)[which](some)
                    pair[which] = (time.perf_counter() - started) * 1e3
                pairs.append(pair)
            # The first of each is a warm-up.
            our_ms, their_ms = zip(*pairs[1:], strict=True)
            ratio = statistics.median(mine / theirs for mine, theirs in zip(our_ms, their_ms, strict=True))
            times.append(PassTimes(context, rows, statistics.median(our_ms), statistics.median(their_ms), ratio))
        cache.release()
    return times


@torch.inference_mode()
def plain_pass(model: PreTrainedModel, prompt: Sequence[int]) -> Pass:
    """transformers' forward of some tokens, as a chain, behind a prompt that its own cache holds."""
    cache = DynamicCache(config=model.config)
    device = next(model.parameters()).device
    model(input_ids=torch.tensor([list(prompt)], device=device), past_key_values=cache, use_cache=True)

    @torch.inference_mode()
    def run(tokens: Sequence[int]) -> None:
        input_ids = torch.tensor([list(tokens)], device=device)
        model(input_ids=input_ids, past_key_values=cache, use_cache=True).logits.float().cpu()
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
