"""Fractions of the target's tokens among the first children of a drafter, and of several, and calibrated sigmas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from coppice.training.target_samples import SampleShape, continue_prompts
from coppice.training.token_store import TokenStore

TEMPERATURES = (0.0, 0.7, 1.0)
RANKS = 4
_ROWS_PER_PART = 8
_SIGMAS = np.round(np.arange(0.3, 2.51, 0.05), 2).tolist()
# Prompts at each temperature.
EVALUATION_ROWS = 48


@dataclass(frozen=True, slots=True)
class AcceptanceReport:
    """Fraction of positions whose token is among the first k children, and calibrated sigma, per temperature.

    `sigmas` are the scales at which softmax((log q + T * G) / sigma) best predicts the right child: the size of the
    difference between the drafter's and the target's log-probabilities on text drawn at that temperature.
    """

    within_rank: dict[float, list[float]]
    sigmas: dict[float, float]
    positions: int

    @property
    def by_rank(self) -> list[float]:
        """Probability that a child is right, by rank, at the highest temperature, as reported by `Describe`."""
        within = self.within_rank[max(self.within_rank)]
        return [share - before for share, before in zip(within, [0.0, *within], strict=False)]

    def calibration(self, context: int) -> dict[str, Any]:
        """Contents of `drafter.json` for a small LM trained on rows of `context` tokens."""
        return {
            "sigmas": self.sigmas,
            "acceptance_by_rank": self.by_rank,
            "within_rank": self.within_rank,
            "context": context,
        }

    def described(self) -> str:
        """The table, and what it has, for a card."""
        return f"""\
Share of positions at which the target's token is among the first k children, both models adding the same noise, on
{self.positions:,} positions of the target's continuations of held-out prompts, and the calibrated sigma:

{self.table()}"""

    def table(self) -> str:
        """A Markdown table."""
        header = "| temperature | " + " | ".join(f"k={rank + 1}" for rank in range(RANKS)) + " | sigma |"
        lines = [header, "|---" * (RANKS + 2) + "|"]
        for temperature, shares in self.within_rank.items():
            cells = [str(temperature), *(f"{share:.3f}" for share in shares), f"{self.sigmas[temperature]:.2f}"]
            lines.append("| " + " | ".join(cells) + " |")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class CoupledPart:
    """Positions of text at one temperature.

    `rows` are the text [rows, tokens]; `noise` [n, V] is added to all models' log-probabilities; `right` [n] are the
    target's tokens, the maxima of its sums.
    """

    temperature: float
    rows: Tensor
    noise: Tensor
    right: Tensor


def coupled_parts(
    target: PreTrainedModel, rows: dict[float, Tensor], prompt_tokens: int, seed: int
) -> Iterator[CoupledPart]:
    """The target's own continuations, in parts, with each position's noise and resulting token.

    Args:
        target: the target.
        rows: per temperature, prompts with the target's continuation [rows, tokens].
        prompt_tokens: prompt tokens per row.
        seed: seed of the noise.
    """
    generator = torch.Generator().manual_seed(seed)
    for temperature, batch in rows.items():
        for part in batch.split(_ROWS_PER_PART):
            logs = continuation_log_probs(target, part, prompt_tokens)
            noise = temperature * gumbel(logs.shape, generator)
            yield CoupledPart(temperature, part, noise, (logs + noise).argmax(-1))


@torch.inference_mode()
def measure_acceptance(
    target: PreTrainedModel, drafter: PreTrainedModel, rows: dict[float, Tensor], prompt_tokens: int, seed: int
) -> AcceptanceReport:
    """Compare both models on the target's own continuations; arguments as in `coupled_parts`."""
    hits = {temperature: torch.zeros(RANKS) for temperature in rows}
    likelihoods = {temperature: np.zeros(len(_SIGMAS)) for temperature in rows}
    counts = dict.fromkeys(rows, 0)
    for part in coupled_parts(target, rows, prompt_tokens, seed):
        scores = continuation_log_probs(drafter, part.rows, prompt_tokens) + part.noise
        right = part.right[:, None]
        hits[part.temperature] += (scores.topk(RANKS).indices == right).float().cumsum(-1).sum(0)
        counts[part.temperature] += len(right)
        likelihoods[part.temperature] += [
            (scores / sigma).log_softmax(-1).gather(1, right).sum().item() for sigma in _SIGMAS
        ]
    within_rank = {temperature: (hits[temperature] / counts[temperature]).tolist() for temperature in rows}
    sigmas = {temperature: _SIGMAS[int(likelihoods[temperature].argmax())] for temperature in rows}
    return AcceptanceReport(within_rank, sigmas, sum(counts.values()))


def gumbel(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Standard Gumbel noise of a shape."""
    return -torch.log(-torch.log(torch.rand(shape, generator=generator).clamp(1e-12, 1 - 1e-7)))


def continuation_log_probs(model: PreTrainedModel, rows: Tensor, prompt_tokens: int) -> Tensor:
    """Log-probabilities of a model for every token after the prompts [n, V]."""
    logits: Tensor = model(input_ids=rows, use_cache=False).logits[:, prompt_tokens - 1 : -1]
    return logits.float().log_softmax(-1).flatten(0, 1)


def held_out_text(target: PreTrainedModel, store: TokenStore, shape: SampleShape, seed: int) -> dict[float, Tensor]:
    """Per temperature, held-out prompts with the target's continuations [rows, tokens]."""
    rows = {}
    target = target.float()
    (windows,) = store.held_out_batches(EVALUATION_ROWS, EVALUATION_ROWS, shape.prompt_tokens)
    for number, temperature in enumerate(TEMPERATURES):
        torch.manual_seed(seed + number)
        continued = continue_prompts(target, windows, shape.new_tokens, temperature)
        rows[temperature] = torch.from_numpy(continued.astype("int64"))
    return rows


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
