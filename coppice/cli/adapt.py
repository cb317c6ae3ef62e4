"""`coppice adapt`: a drafter for any target, from the target's own text."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from coppice.cli.errors import INTERRUPTED
from coppice.cli.options import writable


def adapt(
    target: Annotated[str, typer.Option(help="Checkpoint directory, GGUF file, hub id or short name.")],
    out: Annotated[
        Path, typer.Option(callback=writable, help="Directory of the drafter; unfinished work lies next to it.")
    ],
    tokens: Annotated[int, typer.Option(min=1000, help="Tokens of the answers that the target writes.")] = 1_000_000,
    epochs: Annotated[float, typer.Option(min=0.01, help="Passes of the training over them.")] = 5.0,
    draft_vocab: Annotated[int, typer.Option(min=16, help="Most frequent tokens that the drafter knows.")] = 8192,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(help="JSON lines with `prompt`, or `turns` for its first turn, answered instead; repeatable."),
    ] = None,
    at_once: Annotated[int, typer.Option(min=1, help="Answers that are written at once.")] = 64,
    seed: int = 0,
    threads: Annotated[int, typer.Option(min=0, help="Threads of the training; 0 means every core.")] = 0,
) -> None:
    """Make an EAGLE-3 drafter for a target, from text that the target writes itself, to its own or given prompts.

    Ctrl-C pauses: the same command goes on, and one with more tokens trains OUT further.
    `coppice up --target TARGET --drafter eagle=OUT` serves the result.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    from coppice.adapt.eagle_run import EagleRecipe
    from coppice.adapt.own_text import GivenPrompt, TextShape
    from coppice.adapt.run import AdaptPlan, run_plan, set_threads
    from coppice.lab.bench.prompts import PromptsError, read_prompts

    try:
        given = [GivenPrompt(one.text, one.is_question) for path in prompts or () for one in read_prompts(path)]
    except PromptsError as error:
        raise typer.BadParameter(str(error), param_hint="--prompts") from error
    set_threads(threads)
    recipe = EagleRecipe(seed=seed, epochs=epochs, draft_vocab=draft_vocab)
    try:
        run_plan(AdaptPlan(target, tokens, seed, recipe, TextShape(at_once=at_once), tuple(given)), out)
    except KeyboardInterrupt:
        typer.echo(f"paused; the same command goes on with what is in {out}.state", err=True)
        raise typer.Exit(INTERRUPTED) from None
