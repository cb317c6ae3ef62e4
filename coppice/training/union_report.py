"""Fractions of the target's tokens among the first children of several drafters together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from coppice.training.acceptance_report import continuation_log_probs, coupled_parts


@dataclass(frozen=True, slots=True)
class UnionReport:
    """Fractions of positions, by temperature and number of drafters.

    `within_any[temperature][n - 1]`: the target's token is among the first `children` of any of the first n drafters;
    `within_first[temperature][n - 1]`: it is among the first n x `children` of the first one, at no fewer rows.
    """

    children: int
    within_any: dict[float, list[float]]
    within_first: dict[float, list[float]]

    def table(self, names: Sequence[str]) -> str:
        """Markdown table with the given names of drafters."""
        header = "| temperature | |" + "".join(f" {'+ ' if at else ''}{name} |" for at, name in enumerate(names))
        lines = [header, "|---" * (len(names) + 2) + "|"]
        for temperature in self.within_any:
            for title, shares in (
                (f"first {self.children} of each", self.within_any[temperature]),
                (f"as many of {names[0]} alone", self.within_first[temperature]),
            ):
                lines.append(f"| {temperature} | {title} | " + " | ".join(f"{share:.3f}" for share in shares) + " |")
        return "\n".join(lines)


@torch.inference_mode()
def measure_union(
    target: PreTrainedModel,
    drafters: Sequence[PreTrainedModel],
    rows: dict[float, Tensor],
    prompt_tokens: int,
    seed: int,
    children: int,
) -> UnionReport:
    """Compare drafters on the target's own continuations, with the same noise.

    Args:
        target: the target.
        drafters: the first drafter, then those trained to complement it, in order.
        rows: per temperature, prompts with the target's continuation [rows, tokens].
        prompt_tokens: prompt tokens per row.
        seed: seed of the noise.
        children: children per drafter and position.
    """
    within_any = {temperature: torch.zeros(len(drafters)) for temperature in rows}
    within_first = {temperature: torch.zeros(len(drafters)) for temperature in rows}
    counts = dict.fromkeys(rows, 0)
    for part in coupled_parts(target, rows, prompt_tokens, seed):
        found = torch.zeros(len(part.right), dtype=torch.bool)
        for number, drafter in enumerate(drafters):
            scores = continuation_log_probs(drafter, part.rows, prompt_tokens) + part.noise
            most = children if number else children * len(drafters)
            hits = scores.topk(most).indices == part.right[:, None]
            if not number:
                firsts = hits.float().cumsum(-1).sum(0)
                within_first[part.temperature] += firsts[children - 1 :: children]
            found |= hits[:, :children].any(-1)
            within_any[part.temperature][number] += found.sum()
        counts[part.temperature] += len(part.right)
    return UnionReport(
        children,
        *(
            {temperature: (shares[temperature] / counts[temperature]).tolist() for temperature in rows}
            for shares in (within_any, within_first)
        ),
    )
