"""Why a greedy output is not what `generate` gave: where they part, and how close a call it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from coppice.lab.bench.summary import TRANSFORMERS, Samples

# Float32 logits of one row computed in two ways differ by less than this; a smaller gap is a tie to both.
NEAR_TIE = 1e-4

TopTwo = Callable[[Sequence[int]], tuple[float, tuple[int, int]]]


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

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding alone explains it."""
        return self.top_2_gap < NEAR_TIE and self.token_id in self.top_2_token_ids

    def record(self) -> dict[str, Any]:
        """For the report."""
        return {**asdict(self), "top_2_token_ids": list(self.top_2_token_ids), "near_tie": self.is_near_tie}


def find_divergences(
    samples: Samples, contenders: Sequence[str], prompts: Sequence[Sequence[int]], top_two: TopTwo
) -> list[Divergence]:
    """Where greedy outputs of `contenders` leave those of `generate`, first run."""
    expected = samples.outputs(TRANSFORMERS, 0.0)
    found = []
    for contender in contenders:
        for (run, prompt), given in sorted(samples.outputs(contender, 0.0).items()):
            reference = expected.get((run, prompt))
            if run == 0 and reference is not None and given != reference:
                found.append(_divergence(contender, prompt, given, reference, prompts[prompt], top_two))
    return found


def _divergence(
    contender: str,
    prompt: int,
    given: Sequence[int],
    reference: Sequence[int],
    prompt_ids: Sequence[int],
    top_two: TopTwo,
) -> Divergence:
    pairs = enumerate(zip(given, reference, strict=True))
    position = next(index for index, (mine, theirs) in pairs if mine != theirs)
    gap, top_token_ids = top_two([*prompt_ids, *reference[:position]])
    return Divergence(contender, prompt, position, given[position], reference[position], gap, top_token_ids)
