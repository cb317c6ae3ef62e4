"""Acceptance and calibration of an EAGLE-3 head on held-out answers, by depth and temperature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coppice.adapt.answer_store import Window
from coppice.adapt.eagle_head import EagleHead
from coppice.adapt.eagle_run import EagleLoss

TEMPERATURES = (0.0, 0.7, 1.0)
RANKS = 8
_SIGMAS = np.round(np.arange(0.3, 3.01, 0.1), 2).tolist()


@dataclass(frozen=True, slots=True)
class EagleReport:
    """Shares of held-out positions, by temperature and depth.

    `within_rank[T][d][k]`: share at which the target's token is among the first k + 1 children at depth d + 1, given
    the true tokens before it, both models adding the same noise. `sigmas[T][d]`: scale at which
    softmax((logit + T * G) / sigma) best predicts that token. Tokens outside the draft vocabulary are left out.
    """

    within_rank: dict[float, list[list[float]]]
    sigmas: dict[float, list[float]]
    positions: int

    @property
    def by_rank(self) -> list[float]:
        """Probability that the first token is the child of a rank, at the highest temperature."""
        within = self.within_rank[max(self.within_rank)][0]
        return [share - before for share, before in zip(within, [0.0, *within], strict=False)]

    def calibration(self) -> dict[str, Any]:
        """Contents of `drafter.json`."""
        return {"sigmas": self.sigmas, "acceptance_by_rank": self.by_rank, "within_rank": self.within_rank}

    def table(self) -> str:
        """Markdown table of acceptance by depth."""
        depths = range(1, 1 + len(self.within_rank[0.0]))
        lines = [
            "| temperature | among the first | " + " | ".join(f"depth {depth}" for depth in depths) + " |",
            "|" + "---|" * (2 + len(depths)),
        ]
        for temperature, shares in self.within_rank.items():
            for rank in (1, 4):
                cells = " | ".join(f"{share[rank - 1]:.3f}" for share in shares)
                lines.append(f"| {temperature} | {rank} | {cells} |")
        return "\n".join(lines)


@torch.no_grad()
def measure_head(head: EagleHead, loss: EagleLoss, windows: Sequence[Window], steps: int, seed: int = 0) -> EagleReport:
    """Measure a head on windows of held-out answers, with `steps` depths."""
    generator = torch.Generator().manual_seed(seed)
    counts = {temperature: torch.zeros(steps, RANKS) for temperature in TEMPERATURES}
    likelihoods = {temperature: torch.zeros(steps, len(_SIGMAS)) for temperature in TEMPERATURES}
    totals = torch.zeros(steps)
    for window in windows:
        target = loss.target_logits(window)
        for step, (rows, valid) in enumerate(loss.predictions(head, window, steps)):
            own, right = (rows[valid] @ head.output_rows.T).float(), target[:, step + 1 :][valid].float()
            totals[step] += len(own)
            for temperature in TEMPERATURES:
                found, likely = _compared(own, right, temperature, generator)
                counts[temperature][step] += found
                likelihoods[temperature][step] += likely
    shares = {temperature: (counts[temperature] / totals[:, None]).tolist() for temperature in TEMPERATURES}
    sigmas = {
        temperature: [_SIGMAS[int(best)] for best in likelihoods[temperature].argmax(-1)]
        for temperature in TEMPERATURES
    }
    return EagleReport(shares, sigmas, int(totals[0]))


def _compared(own: Tensor, right: Tensor, temperature: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Rows with the target's token among the first children [RANKS], and log-likelihood of each sigma."""
    if temperature > 0:
        uniform = torch.rand(own.shape, generator=generator).clamp(1e-9, 1 - 1e-7)
        noise = -temperature * (-uniform.log()).log()
        own, right = own + noise, right + noise
    picked = right.argmax(-1, keepdim=True)
    rank = (own > own.gather(-1, picked)).sum(-1)
    found = torch.stack([(rank <= place).sum() for place in range(RANKS)]).float()
    likely = torch.stack([(own / sigma).log_softmax(-1).gather(-1, picked).sum() for sigma in _SIGMAS])
    return found, likely
