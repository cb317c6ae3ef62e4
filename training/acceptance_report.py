"""How often the target's token is among a drafter's first k children, and how sure the drafter may be of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

TEMPERATURES = (0.0, 0.7, 1.0)
RANKS = 4
_SIGMAS = np.round(np.arange(0.3, 2.51, 0.05), 2).tolist()


@dataclass(frozen=True, slots=True)
class AcceptanceReport:
    """Share of positions whose token is among the first k children, and the calibrated sigma, per temperature.

    `sigmas` holds the scale at which softmax((log q + T * G) / sigma) best predicts which child is right: the size of
    the difference between the drafter's and the target's log-probabilities, where the target goes at that temperature.
    """

    within_rank: dict[float, list[float]]
    sigmas: dict[float, float]
    positions: int

    @property
    def by_rank(self) -> list[float]:
        """Probability that a child is right, by its rank, at the highest temperature: what `Describe` reports."""
        within = self.within_rank[max(self.within_rank)]
        return [share - before for share, before in zip(within, [0.0, *within], strict=False)]

    def table(self) -> str:
        """A Markdown table."""
        header = "| temperature | " + " | ".join(f"k={rank + 1}" for rank in range(RANKS)) + " | sigma |"
        lines = [header, "|---" * (RANKS + 2) + "|"]
        for temperature, shares in self.within_rank.items():
            cells = [str(temperature), *(f"{share:.3f}" for share in shares), f"{self.sigmas[temperature]:.2f}"]
            lines.append("| " + " | ".join(cells) + " |")
        return "\n".join(lines)


@torch.inference_mode()
def measure_acceptance(
    target: PreTrainedModel, drafter: PreTrainedModel, rows: dict[float, Tensor], prompt_tokens: int, seed: int
) -> AcceptanceReport:
    """Compare both models on the target's own continuations.

    Args:
        target: the target.
        drafter: the drafter.
        rows: per temperature, prompts with the target's continuation [rows, tokens].
        prompt_tokens: how many tokens of a row are prompt.
        seed: seed of the noise that both models add.
    """
    generator = torch.Generator().manual_seed(seed)
    within_rank: dict[float, list[float]] = {}
    sigmas: dict[float, float] = {}
    positions = 0
    for temperature, batch in rows.items():
        hits = torch.zeros(RANKS)
        likelihood = np.zeros(len(_SIGMAS))
        count = 0
        for part in batch.split(8):
            target_logs = _log_probs(target, part, prompt_tokens)
            drafter_logs = _log_probs(drafter, part, prompt_tokens)
            noise = -torch.log(-torch.log(torch.rand(target_logs.shape, generator=generator).clamp(1e-12, 1 - 1e-7)))
            right = (target_logs + temperature * noise).argmax(-1)
            scores = drafter_logs + temperature * noise
            ranked = scores.topk(RANKS).indices == right[:, None]
            hits += ranked.float().cumsum(-1).sum(0)
            count += len(right)
            likelihood += [(scores / sigma).log_softmax(-1).gather(1, right[:, None]).sum().item() for sigma in _SIGMAS]
        within_rank[temperature] = (hits / count).tolist()
        sigmas[temperature] = _SIGMAS[int(likelihood.argmax())]
        positions += count
    return AcceptanceReport(within_rank, sigmas, positions)


def _log_probs(model: PreTrainedModel, rows: Tensor, prompt_tokens: int) -> Tensor:
    logits: Tensor = model(input_ids=rows, use_cache=False).logits[:, prompt_tokens - 1 : -1]
    return logits.float().log_softmax(-1).flatten(0, 1)
