"""Greedy outputs that leave those of transformers: where, and whether rounding alone explains it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from coppice.lab.bench.client import TRANSFORMERS
from coppice.lab.bench.comparison import Sample, outputs
from coppice.lab.bench.harness.experiment import Samples
from coppice.lab.bench.harness.report import Row

# Logits of one row computed in two ways differ by less than this; a smaller gap is a tie to both.
NEAR_TIES = {"float32": 1e-4, "bfloat16": 0.25}


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first position at which a greedy output leaves that of `generate`."""

    contender: str
    prompt: int
    position: int
    token_id: int
    transformers_token_id: int
    # Between the two best logits there, computed by transformers in one pass over the common prefix.
    top_2_gap: float
    top_2_token_ids: tuple[int, int]
    dtype: str

    @property
    def near_tie(self) -> bool:
        """Whether rounding alone explains it."""
        return self.top_2_gap < NEAR_TIES[self.dtype] and self.token_id in self.top_2_token_ids

    def record(self) -> Row:
        """For the report."""
        return {**asdict(self), "top_2_token_ids": list(self.top_2_token_ids), "near_tie": self.near_tie}

    def __str__(self) -> str:
        return (
            f"{self.contender} leaves transformers generate on prompt {self.prompt + 1} at token {self.position}: "
            f"{self.token_id} instead of {self.transformers_token_id}; the two best logits are {self.top_2_gap:.2e} "
            f"apart{' (a near tie)' if self.near_tie else ''}"
        )


def find_divergences(
    samples: Samples[Sample],
    contenders: Sequence[str],
    top_two: Callable[[Sequence[int]], tuple[float, tuple[int, int]]],
    dtype: str,
) -> list[Divergence]:
    """Where greedy outputs of `contenders` leave those of `generate`, whose dtype that is, first run."""
    greedy = samples.where(temperature=0.0, run=0)
    expected = outputs(greedy, TRANSFORMERS)
    found = []
    for contender in contenders:
        for task, given in outputs(greedy, contender).items():
            reference = expected.get(task)
            if reference is not None and given != reference:
                pairs = enumerate(zip(given, reference, strict=True))
                at = next(index for index, (mine, theirs) in pairs if mine != theirs)
                gap, top_token_ids = top_two([*task.prompt_ids, *reference[:at]])
                one = Divergence(contender, task.prompt, at, given[at], reference[at], gap, top_token_ids, dtype)
                found.append(one)
    return found
