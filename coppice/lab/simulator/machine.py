"""Durations on a machine."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

# Seconds, factors and the like: finite and not negative, which is checked where a machine is read from a file.
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class Curve:
    """Seconds by a number of things: straight lines between points, on beyond the last as before it.

    Raises ValueError if there is no point, sizes do not rise, or seconds are negative, not finite or fall.
    """

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.sizes or len(self.sizes) != len(self.seconds):
            raise ValueError("needs as many seconds as sizes, and one at least")
        if list(self.sizes) != sorted(set(self.sizes)) or self.sizes[0] < 0:
            raise ValueError("sizes must rise, from 0 at the least")
        if not all(math.isfinite(value) and value >= 0 for value in self.seconds):
            raise ValueError("seconds must be finite and not negative")
        if list(self.seconds) != sorted(self.seconds):
            raise ValueError("seconds must not fall")

    def at(self, size: float) -> float:
        """Seconds for a size; below the first point as at it."""
        if size <= self.sizes[0] or len(self.sizes) == 1:
            return self.seconds[0]
        last = min(bisect_left(self.sizes, size), len(self.sizes) - 1)
        low, high = self.sizes[last - 1], self.sizes[last]
        slope = (self.seconds[last] - self.seconds[last - 1]) / (high - low)
        return self.seconds[last - 1] + slope * (size - low)

    def slower(self, factor: float) -> Curve:
        return replace(self, seconds=tuple(factor * value for value in self.seconds))


@dataclass(frozen=True)
class PassWork:
    """What a pass computes: rows of `num_rounds` rounds, and of prompts.

    `context_rows`: over all rows of rounds, the tokens before them.
    """

    num_rounds: int
    round_rows: int
    prompt_rows: int
    context_rows: int

    @property
    def rows(self) -> int:
        return self.round_rows + self.prompt_rows


@dataclass(frozen=True)
class VerifierCosts:
    """Times of a verifier and its limits.

    A pass takes `passes` for its rows, those of rounds after `context` tokens, `row_context_s` for each of these rows
    and token of more context, `sequence_s` for each further sequence, `round_row_s` more for a round's row, of which
    logits are wanted, and `prompt_token_s` more for a prompt's.
    Before it lie `start_s` from when it may start, after it `gap_s` until its outcomes are on their way, and more by
    sequence and by committed token: scheduling, and whatever else the model does not do.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")
    passes: Curve
    context: int = 256
    row_context_s: Amount = 0.0
    sequence_s: Amount = 0.0
    round_row_s: Amount = 0.0
    prompt_token_s: Amount = 0.0
    gap_s: Amount = 0.0
    gap_sequence_s: Amount = 0.0
    gap_token_s: Amount = 0.0
    start_s: Amount = 0.0
    start_sequence_s: Amount = 0.0
    row_multiple: int = 1
    max_nodes: int = 64
    max_sequences: int = 64
    prefill_chunk: int = 512
    max_rows: int = 0

    def pass_s(self, work: PassWork) -> float:
        """Time of a pass."""
        padded = -(-max(1, work.rows) // self.row_multiple) * self.row_multiple
        more_context = work.context_rows - work.round_rows * self.context
        seconds = self.passes.at(padded) + self.row_context_s * more_context
        seconds += self.sequence_s * max(0, work.num_rounds - 1)
        return max(0.0, seconds) + self.round_row_s * work.round_rows + self.prompt_token_s * work.prompt_rows

    def after_s(self, num_rounds: int, num_tokens: int) -> float:
        """From the end of a pass to when its outcomes are on their way and the next may start."""
        return self.gap_s + self.gap_sequence_s * num_rounds + self.gap_token_s * num_tokens

    def before_s(self, num_sequences: int) -> float:
        """From when a pass of so many sequences may start to when the model computes."""
        return self.start_s + self.start_sequence_s * num_sequences

    def slower(self, factor: float) -> VerifierCosts:
        times = [name for name in vars(self) if name.endswith("_s")]
        return replace(
            self, passes=self.passes.slower(factor), **{name: factor * getattr(self, name) for name in times}
        )


@dataclass(frozen=True)
class DrafterCosts:
    """Times of a drafter, which serves its sequences one after another: a draft by its nodes, and reading a token."""

    drafts: Curve
    read_token_s: Amount = 0.0

    def draft_s(self, num_nodes: int, num_unread: int) -> float:
        """Time of a draft after so many tokens that the drafter has not read; one is always new."""
        return self.drafts.at(num_nodes) + self.read_token_s * max(0, num_unread - 1)

    def slower(self, factor: float) -> DrafterCosts:
        return DrafterCosts(self.drafts.slower(factor), factor * self.read_token_s)


@dataclass(frozen=True)
class Contention:
    """What services take from each other where they share cores.

    A second in which a drafter is busy adds `pass_per_draft` seconds to a pass on its cores, and while a pass runs,
    drafts take `draft_factor` times as long. An orchestrator's messages take `orchestrator_factor` times as long.
    """

    pass_per_draft: Amount = 0.0
    draft_factor: Amount = 1.0
    orchestrator_factor: Amount = 1.0


@dataclass(frozen=True)
class OrchestratorCosts:
    """Times of an orchestrator, which takes one message after another: an outcome, and a drafter's tree.

    `ask_s`: for asking a drafter after an outcome.
    `turnaround_s`: from when it has a request's last outcome to when its client's next request is at the verifier.
    """

    outcome_s: Amount = 0.0
    ask_s: Amount = 0.0
    tree_s: Amount = 0.0
    turnaround_s: Amount = 0.0


@dataclass(frozen=True)
class Machine:
    """A machine, or several that are alike. `message_s`: from one service to the next.

    `noise`: passes take a factor more or less, of which this is the standard deviation of the logarithm.
    """

    verifier: VerifierCosts
    drafter: DrafterCosts
    message_s: Amount = 0.0
    contention: Contention = field(default_factory=Contention)
    noise: Amount = 0.0
    orchestrator: OrchestratorCosts = field(default_factory=OrchestratorCosts)

    def scaled(self, verifier_speed: float = 1.0, drafter_speed: float = 1.0) -> Machine:
        """The machine with verifiers and drafters so many times as fast."""
        return replace(
            self, verifier=self.verifier.slower(1 / verifier_speed), drafter=self.drafter.slower(1 / drafter_speed)
        )

    def separated(self) -> Machine:
        """Verifiers and drafters on machines of their own, at the same distance."""
        return replace(self, contention=Contention())


def noise_factor(gauss: float, noise: float) -> float:
    """How much longer than usual something takes, from a standard normal number."""
    return math.exp(noise * gauss)
