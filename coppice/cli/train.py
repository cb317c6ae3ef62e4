"""`coppice train`: the recipes of the bundled models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from coppice.checkpoints.bundled import MODELS
from coppice.cli.options import writable
from coppice.kernels.cpu.openmp import set_spin_count
from coppice.usable_cores import usable_cores

app = typer.Typer(
    help="Train the tokenizer, the target, a drafter or an early head: seeded and resumable.", no_args_is_help=True
)

Corpus = Annotated[
    list[Path] | None,
    typer.Option(help="Directory of Python sources; repeatable. Default: standard library and installed packages."),
]
Out = Annotated[Path, typer.Option(callback=writable)]
Threads = Annotated[int, typer.Option(help="Threads for torch; 0 means every core.")]
Steps = Annotated[int, typer.Option(min=1)]
# The target is sampled in batches of so many, of which there has to be one.
Samples = Annotated[int, typer.Option(min=64, help="Continuations of the target to train on, in batches of 64.")]


@app.command()
def tokenizer(corpus: Corpus = None, out: Out = MODELS / "tokenizer") -> None:
    """Train the byte-level BPE tokenizer."""
    from coppice.training.corpus import read_corpus
    from coppice.training.tokenizer import train_tokenizer

    train_tokenizer(read_corpus(roots_of(corpus)), out)


@app.command()
def target(
    corpus: Corpus = None,
    out: Out = MODELS / "target",
    tokenizer_dir: Annotated[
        Path, typer.Option("--tokenizer", help="Default: the bundled target's; for a new one what `tokenizer` made.")
    ] = MODELS / "target",
    steps: Steps = 2000,
    seed: int = 0,
    threads: Threads = 0,
) -> None:
    """Train the bundled target model."""
    set_threads(threads)
    from verifier_svc.training.target import TargetRecipe, train_target

    train_target(roots_of(corpus), tokenizer_dir, out, TargetRecipe(steps=steps, seed=seed))


@app.command("small-lm")
def small_lm(
    corpus: Corpus = None,
    out: Out = MODELS / "small-lm",
    target_dir: Annotated[Path, typer.Option("--target")] = MODELS / "target",
    steps: Annotated[int, typer.Option(min=1, help="Steps over rows that the target looks at once.")] = 9000,
    fresh_cycles: Annotated[int, typer.Option(min=0, help="Cycles after them over rows drawn anew in every step.")] = 2,
    fresh_steps: Annotated[int, typer.Option(min=1, help="Steps of each of these cycles.")] = 4500,
    samples: Samples = 3072,
    seed: int = 0,
    threads: Threads = 0,
) -> None:
    """Distil the small LM from the target's own continuations."""
    set_threads(threads)
    from drafter_svc.training.small_lm import SmallLmRecipe, train_small_lm

    recipe = SmallLmRecipe(
        steps=steps, fresh_cycles=fresh_cycles, fresh_steps=fresh_steps, sample_rows=samples, seed=seed
    )
    train_small_lm(roots_of(corpus), target_dir, out, recipe)


TargetDir = Annotated[Path, typer.Option("--target")]
Start = Annotated[Path, typer.Option(help="The small LM to start from.")]
LayersAlone = Annotated[
    bool, typer.Option("--layers-alone", help="Keep the small LM's embeddings, and leave them out of the checkpoint.")
]
CorpusRows = Annotated[int, typer.Option(min=1, help="Rows of corpus text to train on.")]


def _block_command(kind: str, text: str) -> None:
    """Add the command that trains a kind of block drafter."""

    def train(
        corpus: Corpus = None,
        out: Out = MODELS / kind,
        target_dir: TargetDir = MODELS / "target",
        start: Start = MODELS / "small-lm",
        steps: Steps = 3000,
        samples: Samples = 768,
        corpus_rows: CorpusRows = 1536,
        layers_alone: LayersAlone = False,
        seed: int = 0,
        threads: Threads = 0,
    ) -> None:
        set_threads(threads)
        from drafter_svc.training import block_run, diffusion, semi_ar

        objectives: tuple[type[block_run.Objective], ...] = semi_ar.SemiArObjective, diffusion.DiffusionObjective
        [objective] = [one for one in objectives if one.usual.kind == kind]
        recipe = replace(
            objective.usual,
            steps=steps,
            sample_rows=samples,
            corpus_rows=corpus_rows,
            layers_alone=layers_alone,
            seed=seed,
        )
        block_run.train_block_drafter(roots_of(corpus), target_dir, start, out, objective(recipe))

    app.command(kind, help=text)(train)


_block_command("semi-ar", "Teach the small LM to predict a block of tokens in one pass, by masks after the last token.")
_block_command("diffusion", "Train a masked-diffusion drafter from the small LM, and align it with the target.")


@app.command()
def boost(
    corpus: Corpus = None,
    out: Annotated[Path, typer.Option(callback=writable, help="The directory of boost-1, boost-2, …")] = MODELS,
    target_dir: TargetDir = MODELS / "target",
    start: Start = MODELS / "small-lm",
    num: Annotated[int, typer.Option(min=1, help="How many, one after another.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Of each.")] = 2000,
    samples: Samples = 768,
    corpus_rows: CorpusRows = 1536,
    seed: int = 0,
    threads: Threads = 0,
) -> None:
    """Train small LMs that add to each other, each on what those before it miss."""
    from drafter_svc.drafters.kinds import MAX_BOOSTED

    if num > MAX_BOOSTED:
        raise typer.BadParameter(f"--num: a request has at most {MAX_BOOSTED} of them, got {num}")
    set_threads(threads)
    from drafter_svc.training.boost import BoostRecipe, train_boost

    recipe = BoostRecipe(steps=steps, sample_rows=samples, corpus_rows=corpus_rows, seed=seed)
    train_boost(roots_of(corpus), target_dir, start, out, num, recipe)


@app.command()
def space(
    corpus: Corpus = None,
    out: Out = MODELS / "space",
    target_dir: TargetDir = MODELS / "target",
    steps: Steps = 1000,
    masks: Annotated[int, typer.Option(min=1, max=16, help="Masks of a group: tokens that a re-draft is deep.")] = 5,
    rank: Annotated[int, typer.Option(min=1, help="Of the additions to the target's layers.")] = 16,
    module: Annotated[
        list[str] | None,
        typer.Option(help="Linear layers with additions, by the last part of their names; repeatable. Default: all."),
    ] = None,
    samples: Samples = 768,
    corpus_rows: CorpusRows = 1536,
    seed: int = 0,
    threads: Threads = 0,
) -> None:
    """Teach the target to draft for itself in its own passes: an adapter; the target's weights stay as they are."""
    set_threads(threads)
    from verifier_svc.training.space import SpaceRecipe, train_space

    recipe = SpaceRecipe(
        steps=steps,
        masks=masks,
        rank=rank,
        modules=tuple(module or ()),
        sample_rows=samples,
        corpus_rows=corpus_rows,
        seed=seed,
    )
    train_space(roots_of(corpus), target_dir, out, recipe)


@app.command("early-exit")
def early_exit(
    corpus: Corpus = None,
    out: Out = MODELS / "early-head",
    target_dir: TargetDir = MODELS / "target",
    layer: Annotated[int, typer.Option(min=1, help="Layers of the target that come before the head.")] = 4,
    rank: Annotated[int, typer.Option(min=1, help="Of the head's addition to the norm.")] = 128,
    steps: Steps = 400,
    seed: int = 0,
    threads: Threads = 0,
) -> None:
    """Teach a small head after an early layer which drafted tokens the target would hardly draw."""
    set_threads(threads)
    from verifier_svc.training.early_exit import EarlyExitRecipe, train_early_exit

    recipe = EarlyExitRecipe(layer=layer, rank=rank, steps=steps, seed=seed)
    train_early_exit(roots_of(corpus), target_dir, out, recipe)


def roots_of(corpus: list[Path] | None) -> list[Path]:
    """Directories that are given, or the default ones."""
    from coppice.training.corpus import default_roots

    return corpus or default_roots()


def set_threads(threads: int) -> None:
    """Set the number of torch's threads, and how they wait."""
    set_spin_count()
    import torch

    torch.set_num_threads(threads or usable_cores())
