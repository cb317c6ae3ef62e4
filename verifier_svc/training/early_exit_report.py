"""An early head's calibration and its effect on held-out text, and its card's text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coppice.training.acceptance_report import TEMPERATURES
from verifier_svc.verify.draw_rule import Threshold, Thresholds

# The drawn token, and further ones that stand for a drafter's other children.
CHILDREN = 4

# Of a card, after the facts.
STORY = """
Acts after layer {layer} of the target. Trained on the target's own distributions over the text. The held-out figure
above includes the penalty for not being normalised: it does not compare with that of a language model.

Thresholds are calibrated on one half of held-out windows of text for a recall of {recall}; the rows below are the other
half's. Recall: the share of tokens drawn by the target that are not pruned. Removed: of the {others} tokens that the
target itself ranks below the drawn one, noise included, the share that is pruned. No drafter could have better wrong
children, and so these are the hardest to rule out.

| temperature | threshold | recall | removed |
|---|---|---|---|
{rows}

`early_head.json` has the thresholds.
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


def described(layer: int, recall: float, measured: Sequence[HeadMeasurement]) -> str:
    """Text of the card."""
    rows = "\n".join(f"| {m.temperature:g} | {m.threshold:.3f} | {m.recall:.4f} | {m.removed:.3f} |" for m in measured)
    return STORY.format(layer=layer, recall=recall, others=CHILDREN - 1, rows=rows)
