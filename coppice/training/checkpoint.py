"""Writing a checkpoint: safetensors in bf16, the tokenizer next to it, and a card on how it was made."""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from coppice.training.loop import TrainingLoop
from coppice.training.token_store import TokenStore

CARD = """# {title}

| | |
|---|---|
| parameters | {parameters:,} |
| data | {train_tokens:,} training tokens of Python sources (standard library and installed packages); \
files whose name hashes into the held-out split were never trained on |
| held-out | {bits_per_byte:.4f} bits per byte ({held_out_loss:.4f} nats per token over windows of \
{held_out_tokens:,} held-out tokens) |
| command | `{command}` |
| seed | {seed} |
| steps | {steps} |
| training time | {minutes:.0f} minutes on {machine} |
| versions | {versions} |
| date | {date} |
| licence | weights Apache-2.0; trained on sources under their own licences |
{extra}
`recipe.json` next to this card holds every setting and the validation curve (`validation_curve.png`).
"""


def save_checkpoint(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    out: Path,
    *,
    title: str,
    recipe: Any,
    store: TokenStore,
    loop: TrainingLoop,
    extra: str = "",
) -> None:
    """Write weights (bf16), tokenizer, `recipe.json`, the validation curve and the card to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    model.train(False)
    model.to(torch.bfloat16)  # type: ignore[arg-type]
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    write_card(out, title=title, parameters=parameters, recipe=recipe, store=store, loop=loop, extra=extra)


def write_card(
    out: Path, *, title: str, parameters: int, recipe: Any, store: TokenStore, loop: TrainingLoop, extra: str = ""
) -> None:
    """Write `recipe.json`, the validation curve and the card to `out`, next to the weights."""
    facts = {"title": title, **_run_facts(parameters, recipe, store, loop)}
    facts["bits_per_byte"] = facts["held_out_loss"] / math.log(2) / store.held_out_bytes_per_token
    (out / "README.md").write_text(CARD.format(**facts, extra=extra))
    record = {**facts, "recipe": asdict(recipe), "curve": loop.curve}
    (out / "recipe.json").write_text(json.dumps(record, indent=1) + "\n")
    plot_curve(loop.curve, out / "validation_curve.png", title)
    make_readable(out)


def make_readable(directory: Path) -> None:
    """Give files the default permissions, since services rarely run as the user who trained.

    The safetensors library creates files readable by their owner only, whatever the umask.
    """
    mask = os.umask(0)
    os.umask(mask)
    for path in directory.iterdir():
        if path.is_file():
            path.chmod(0o666 & ~mask)


def _run_facts(parameters: int, recipe: Any, store: TokenStore, loop: TrainingLoop) -> dict[str, Any]:
    """Facts of a card: command, data, machine, versions, date and final losses."""
    last = loop.curve[-1]
    return {
        "command": "coppice " + shlex.join(sys.argv[1:]),
        "seed": recipe.seed,
        "steps": last["step"],
        "parameters": parameters,
        "train_tokens": len(store.train),
        "held_out_tokens": len(store.held_out),
        "held_out_loss": last["held_out"],
        "minutes": loop.seconds / 60,
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}",
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
    }


def plot_curve(curve: list[dict[str, float]], path: Path, title: str) -> None:
    """Draw held-out and training loss against steps."""
    from matplotlib import pyplot as plt

    from coppice.picture import save

    figure, axes = plt.subplots(figsize=(6, 3.5), dpi=80)
    steps = [entry["step"] for entry in curve]
    axes.plot(steps, [entry["train"] for entry in curve], label="training batch", alpha=0.5)
    axes.plot(steps, [entry["held_out"] for entry in curve], label="held out")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(title)
    axes.legend()
    figure.tight_layout()
    save(figure, path)
