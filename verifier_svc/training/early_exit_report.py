"""An early head's calibration and its effect on held-out text, and its card."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from coppice.training.acceptance_report import TEMPERATURES
from coppice.training.checkpoint import run_facts
from coppice.training.loop import TrainingLoop
from coppice.training.token_store import TokenStore
from verifier_svc.verify.draw_rule import Threshold, Thresholds

# The drawn token, and further ones that stand for a drafter's other children.
CHILDREN = 4

CARD = """# Early-exit head

| | |
|---|---|
| acts after | layer {layer} of the target |
| parameters | {parameters:,} |
| data | {train_tokens:,} training tokens of Python sources; the target's own distributions over them |
| held-out | {held_out_loss:.4f} nats per token, the penalty for not being normalised included |
| command | `{command}` |
| seed | {seed} |
| steps | {steps} |
| training time | {minutes:.0f} minutes on {machine} |
| versions | {versions} |
| date | {date} |
| licence | weights Apache-2.0; trained on sources under their own licences |

Thresholds are calibrated on one half of held-out windows of text for a recall of {recall}; the rows below are the other
half's. Recall: the share of tokens drawn by the target that are not pruned. Removed: of the {others} tokens that the
target itself ranks below the drawn one, noise included, the share that is pruned. No drafter could have better wrong
children, and so these are the hardest to rule out.

| temperature | threshold | recall | removed |
|---|---|---|---|
{rows}

`early_head.json` has the thresholds, `recipe.json` every setting and the validation curve.
"""


@dataclass(frozen=True, slots=True)
class Values:
    """Values compared with thresholds: of drawn tokens [N], and of the next children [N, CHILDREN - 1]."""

    drawn: Tensor
    others: Tensor


@dataclass(frozen=True, slots=True)
class HeadMeasurement:
    """Effect of a threshold at its temperature; `removed` is the share of likely but wrong children that it prunes."""

    temperature: float
    threshold: float
    recall: float
    removed: float


def collect(batches: Iterable[tuple[Tensor, Tensor]], seed: int) -> dict[float, Values]:
    """Values by temperature, from batches of early scores and the target's logits of the same rows [rows, vocab]."""
    parts: dict[float, list[Tensor]] = {temperature: [] for temperature in TEMPERATURES}
    for index, (scores, logits) in enumerate(batches):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
        uniform = torch.rand(logits.shape, generator=generator, dtype=torch.float64).clamp(1e-12, 1 - 1e-12)
        noise = (-(-uniform.log()).log()).float()
        for temperature in TEMPERATURES:
            children = (logits + temperature * noise).topk(CHILDREN).indices
            parts[temperature].append((scores + temperature * noise).gather(-1, children))
    joined = {temperature: torch.cat(values) for temperature, values in parts.items()}
    return {temperature: Values(values[:, 0], values[:, 1:]) for temperature, values in joined.items()}


def calibrate(values: Mapping[float, Values], recall: float) -> Thresholds:
    """For each temperature the highest threshold reached by at least a share of `recall` of drawn tokens."""
    thresholds = []
    for temperature, at in values.items():
        drawn = at.drawn.sort().values
        lowest = drawn[int((1 - recall) * len(drawn))]
        thresholds.append(Threshold(temperature, float(lowest), float((drawn >= lowest).double().mean())))
    return tuple(thresholds)


def measure(values: Mapping[float, Values], thresholds: Thresholds) -> list[HeadMeasurement]:
    """Effect of thresholds on values not used for calibration."""
    return [
        HeadMeasurement(
            threshold.temperature,
            threshold.score,
            recall=float((values[threshold.temperature].drawn >= threshold.score).double().mean()),
            removed=float((values[threshold.temperature].others < threshold.score).double().mean()),
        )
        for threshold in thresholds
    ]


def write_card(
    out: Path, recipe: Any, store: TokenStore, loop: TrainingLoop, head: nn.Module, measured: Sequence[HeadMeasurement]
) -> None:
    """Write the card and `recipe.json`."""
    parameters = sum(parameter.numel() for parameter in head.parameters())
    facts = {**run_facts(parameters, recipe, store, loop), "layer": recipe.layer, "recall": recipe.recall}
    rows = "\n".join(f"| {m.temperature:g} | {m.threshold:.3f} | {m.recall:.4f} | {m.removed:.3f} |" for m in measured)
    (out / "README.md").write_text(CARD.format(**facts, others=CHILDREN - 1, rows=rows))
    record = {**facts, "recipe": asdict(recipe), "curve": loop.curve, "measured": [asdict(m) for m in measured]}
    (out / "recipe.json").write_text(json.dumps(record, indent=1) + "\n")
