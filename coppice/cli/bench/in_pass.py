"""`coppice bench ablation --suite in-pass`: what the target's own drafts and early pruning are worth."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from coppice.checkpoints.bundled import MODELS
from coppice.cli.bench.options import (
    choose_parts,
    choose_prompts,
    choose_temperatures,
    drafter_spec,
    numbers,
    require_checkpoint,
)
from coppice.cli.bench.services import finish, run_or_exit
from coppice.cli.topology import DEFAULT_KIND, TopologySpec

if TYPE_CHECKING:
    from coppice.lab.bench.in_pass.variants import InPass

# Prompts, tokens and runs.
USUAL_SIZES, QUICK_SIZES = (4, 128, 2), (2, 24, 1)
USUAL_BATCHES, QUICK_BATCHES = "1,4,16", "1,4"
USUAL_TREES, QUICK_TREES = "8,16,32", "8"
PARTS = ("drafting", "pruning")
# A verifier's own limit on a round's nodes.
MOST_NODES = 64
# Of plain decoding on two cores, to say beforehand about how long it will take.
TOKENS_PER_S = 150
# Room for the sequences of a benchmark; so many verifiers at once cannot each have the usual gibibyte.
KV_CACHE_MIB = 256


@dataclass(frozen=True, slots=True)
class Sizes:
    """Prompts, tokens and runs as they were given; None leaves one to the suite."""

    num_prompts: int | None
    max_tokens: int | None
    num_runs: int | None

    def or_else(self, usual: tuple[int, int, int]) -> tuple[int, int, int]:
        """What was given, or what is usual."""
        given = (self.num_prompts, self.max_tokens, self.num_runs)
        prompts, tokens, runs = (mine or theirs for mine, theirs in zip(given, usual, strict=True))
        return prompts, tokens, runs


@dataclass(frozen=True, slots=True)
class InPassOptions:
    """What the command line says of the models, trees and batches; None leaves it to the suite."""

    target: Path
    drafter: list[str] | None
    space: Path | None
    early_head: Path | None
    batches: str | None
    tree_sizes: str | None
    parts: str | None
    quick: bool
    threads: int

    def compared(self) -> tuple[InPass, tuple[str, ...]]:
        """What there is to compare, and what is left out and why.

        Raises:
            typer.BadParameter: an option makes no sense, or there is nothing to compare.
        """
        from coppice.lab.bench.in_pass.variants import GROUPS, MASKS, InPass

        texts = self.drafter or [DEFAULT_KIND]
        if len(texts) > 1:
            raise typer.BadParameter("--drafter: --suite in-pass takes one")
        drafter = drafter_spec(texts[0])
        require_checkpoint(Path(drafter.model), "--drafter")
        batches = numbers(self.batches or (QUICK_BATCHES if self.quick else USUAL_BATCHES), "--batches")
        trees = numbers(self.tree_sizes or (QUICK_TREES if self.quick else USUAL_TREES), "--tree-sizes")
        if max(trees) > MOST_NODES:
            raise typer.BadParameter(f"--tree-sizes: a round has at most {MOST_NODES} nodes, got {max(trees)}")
        space, num_masks = _space(self.space)
        head, missing = _early_head(self.early_head, self.target)
        left_out = [missing] if missing else []
        if not space:
            left_out.append("The target's own drafts are left out: no adapter (coppice train space, --space).")
        if not space and not head:
            raise typer.BadParameter(" ".join(["nothing to compare.", *left_out]))
        parts = choose_parts(self.parts, PARTS)
        drafting, pruning = (part in parts for part in PARTS)
        if not (drafting or (pruning and head)):
            raise typer.BadParameter(" ".join(["--parts: nothing to compare.", *left_out]))
        masks, groups = ((min(3, num_masks),), (1,)) if self.quick else (MASKS, GROUPS)
        if unknown := [count for count in masks if space and count > num_masks]:
            left_out.append(f"k={', '.join(map(str, unknown))} are left out: the adapter has {num_masks} masks.")
        prunes = pruning and bool(head)
        sizes = (trees, batches) if prunes else ((), ())
        what = InPass(drafter, space, num_masks, head if prunes else "", masks, groups, *sizes, drafting=drafting)
        return what, tuple(left_out)


def run_in_pass(
    options: InPassOptions,
    prompts: Path | None,
    sizes: Sizes,
    temperature: list[float] | None,
    seed: int,
    out: Path,
) -> None:
    """Measure, write `in-pass.json` and `.png`, print tables; exit code 1 when a token is not plain decoding's."""
    what, left_out = options.compared()
    temperatures = choose_temperatures(temperature)
    count, length, num_runs = sizes.or_else(QUICK_SIZES if options.quick else USUAL_SIZES)
    chosen = choose_prompts(prompts, max(count, *what.batch_sizes, 1), seed)

    from coppice.lab.bench.in_pass.suite import InPassSuite, shown, variants_of
    from coppice.lab.bench.in_pass.variants import make_groups
    from coppice.lab.bench.latency import Plan
    from coppice.lab.bench.services import measure_on

    plan = Plan(num_runs, length, temperatures, seed)
    threads = options.threads or os.cpu_count() or 1
    suite = InPassSuite(
        options.target, what, make_groups(what), tuple(chosen), min(count, len(chosen)), plan, threads, left_out
    )
    num_verifiers = len({variant.verifier for variant in variants_of(suite.groups)})
    seconds = suite.num_requests * length / TOKENS_PER_S
    typer.echo(
        f"{suite.num_requests} completions of {length} tokens with {num_verifiers} verifiers: "
        f"{seconds / 60:.0f} minutes where all of it has {TOKENS_PER_S} tokens/s, and their start",
        err=True,
    )
    spec = TopologySpec(str(options.target), (), threads=options.threads, kv_cache_mib=KV_CACHE_MIB)
    report = run_or_exit(measure_on(spec, suite.start, suite.run))
    finish(report, shown(report), out)


def _space(directory: Path | None) -> tuple[str, int]:
    """The adapter's directory and its number of masks; nothing where none was asked for and none is bundled."""
    from coppice.core.errors import IncompatibleError
    from verifier_svc.extras.redraft.space_adapter import DESCRIPTION_FILE, load_adapter

    chosen = directory or MODELS / "space"
    if directory is None and not (chosen / DESCRIPTION_FILE).is_file():
        return "", 0
    try:
        return str(chosen.resolve()), load_adapter(chosen).num_masks
    except IncompatibleError as error:
        raise typer.BadParameter(f"--space: {error}") from error


def _early_head(directory: Path | None, target: Path) -> tuple[str, str]:
    """The head's directory, the bundled target's by default, or why early pruning is left out."""
    chosen = directory or MODELS / "early-head"
    is_bundled = target.resolve() == (MODELS / "target").resolve()
    exists = (chosen / "early_head.json").is_file() and (directory is not None or is_bundled)
    if directory is not None and not exists:
        raise typer.BadParameter(f"--early-head: no head in {directory}")
    if not exists:
        return "", "Early pruning is left out: no head (coppice train early-exit, --early-head)."
    return str(chosen.resolve()), ""
