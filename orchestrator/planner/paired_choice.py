"""Paired A/B test among sets of drafters, the empty one included, by rates of adjacent blocks of passes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Least passes and rounds of a block: accepted tokens of a round vary by about their mean, a block's mean by a sixth.
BLOCK_PASSES, BLOCK_ROUNDS = 8, 32
# Passes as the arm says between a switch and its block, which work that was left over slows down; and most passes until
# then. Ablated in the simulator: without them, the first plain passes look up to 30 % too slow.
SETTLED_PASSES, LONGEST_SETTLING = 4, 48
# Share of all time that trials may cost: two thirds of the 3 % by which planning may be slower than plain decoding.
TRIAL_COST = 0.02
# Least cost of a trial as a share of its time, so that equal arms are compared in a third of the time at most.
LEAST_COST = 2 * TRIAL_COST
# Standard deviation of a block's log-rate before any is known; blocks of the profiled machine have 0.1 to 0.2.
NOISE = 0.2
# Decay of earlier blocks' and comparisons' weight per later one, since texts and load change: about five count.
FADE = 0.8
# Unread tokens below which what a trial loses before its block is mostly noise. Without it, grid cells lose 12 %.
FEW_TOKENS = 256
# Standard deviations that are no chance (1 %): a trial ends early, or texts have changed since the last one.
SURELY = 2.5

# Kinds of drafters that are asked, in order.
Arm = tuple[str, ...]
OFF: Arm = ()
# Whichever drafters there are.
ALL: Arm = ("*",)


@dataclass(slots=True)
class Block:
    """Sums over passes of one arm."""

    passes: float = 0.0
    rounds: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    @property
    def pass_s(self) -> float:
        """Seconds per pass."""
        return self.seconds / self.passes

    def add(self, later: Block, fade: float = FADE) -> None:
        """Add a later block, with less weight on earlier ones."""
        self.passes = fade * self.passes + later.passes
        self.rounds = fade * self.rounds + later.rounds
        self.tokens = fade * self.tokens + later.tokens
        self.seconds = fade * self.seconds + later.seconds


@dataclass(slots=True)
class _Comparison:
    """Weighted log-ratios of one arm's rate to another's; the prior of no difference counts as one of them."""

    total: float = 0.0
    squares: float = 0.0
    weight: float = 0.0

    def add(self, log_ratio: float) -> None:
        if self.weight and abs(log_ratio - self.total / self.weight) > SURELY * NOISE:
            # Texts have changed.
            self.total = self.squares = self.weight = 0.0
        self.total = FADE * self.total + log_ratio
        self.squares = FADE * self.squares + log_ratio * log_ratio
        self.weight = FADE * self.weight + 1

    @property
    def mean(self) -> float:
        return self.total / (self.weight + 1)

    @property
    def error(self) -> float:
        """Standard error of the mean."""
        spread = self.squares - self.total * self.total / self.weight if self.weight else 0.0
        return math.sqrt(NOISE * NOISE + max(0.0, spread)) / (self.weight + 1)


@dataclass(slots=True)
class _Trial(Block):
    """All passes since a trial began, those after its block that it slows down included."""

    # Tokens that drafters had not read when it began, and most seconds that it may lose before its block.
    unread: int = 0
    most_lost_s: float = 0.0
    is_free: bool = False


@dataclass(slots=True)
class TrialBudget:
    """Seconds that trials at any load may cost, and what they lost while drafters read."""

    credit_s: float = 0.0
    read: float = 0.0
    lost_s: float = 0.0

    def reading_s(self, num_unread: int) -> float:
        """Seconds that are lost while drafters read so many tokens."""
        return num_unread * self.lost_s / self.read if self.read else 0.0

    def add(self, num_unread: int, lost_s: float) -> None:
        """Learn what a trial lost before its block."""
        self.read = FADE * self.read + num_unread
        self.lost_s = FADE * self.lost_s + max(0.0, lost_s)


class PairedChoice:
    """Runs the best arm, and others in trials of one block.

    A trial's block is compared with the blocks just before it, so that slow drift of load and machine cancels out.
    Another arm is taken once its mean advantage exceeds its standard error, `OFF` as soon as it is above 0, and fewer
    drafters unless they seem worse: the burden of proof is on drafters. The next trial waits until the time that it is
    expected to lose, reading by drafters included, is `TRIAL_COST` of the time that has passed, and, where `OFF` is the
    best, as many times as long as the arm is standard errors worse: trials of an arm that is surely worse are rare and
    those of an equal one frequent. One that loses more is given up. Arms are `OFF`, `ALL`, each kind alone, and those
    that differ from the best by one kind.
    """

    def __init__(
        self,
        kinds: Sequence[str] = (),
        known: PairedChoice | None = None,
        guessed: Mapping[str, float] | None = None,
        best: Arm | None = None,
    ) -> None:
        """`kinds` to choose from, if several. `known` is the choice at another load. `best` is in use first, if given.

        `guessed` are tokens that each kind guesses in a row, as far as known; the best guessers are tried first.
        """
        # The arm in use, and the one of the current block.
        if best is None:
            best = ALL if known is None else known.best
        self.best: Arm = best
        self.current: Arm = best
        # The last blocks of each arm.
        self.blocks: dict[Arm, Block] = {}
        self._kinds = tuple(kinds)
        self._comparisons: dict[tuple[Arm, Arm], _Comparison] = {}
        self._guessed, self.budget = {} if guessed is None else guessed, TrialBudget()
        if known is not None:
            self._guessed, self.budget = known._guessed, known.budget
            for pair, one in known._comparisons.items():
                # Less than one trial at this load.
                one = _Comparison(one.mean, one.mean * one.mean, 1.0) if one.weight else one
                self._comparisons[pair] = _Comparison(FADE * one.total, FADE * one.squares, FADE * one.weight)
        # The trial whose cost is being counted.
        self._trial: _Trial | None = None
        # Whether the last block of the best arm was just before the current one.
        self._is_adjacent = False
        self._to_settle = 1
        self._block = Block()
        self._settled = self._unsettled = 0
        # Seconds that prompts take for each token, without drafts and with them. They are in no block.
        self.other_s = 0.0, 0.0

    @property
    def is_trial(self) -> bool:
        """Whether the current block is a trial."""
        return self.current != self.best

    def leave(self) -> None:
        """End the current block: the next pass is not adjacent to it."""
        self.current, self._is_adjacent, self._block = self.best, False, Block()
        self.hold()

    def hold(self) -> None:
        """Interrupt the current block: what follows is not of its arm until it has settled again."""
        self._settled = self._unsettled = 0
        self._to_settle = SETTLED_PASSES

    def offer(self, kinds: Sequence[str]) -> None:
        """Choose from these kinds from now on."""
        self._kinds = tuple(kinds)
        if not set(self.best) <= {*kinds, *ALL}:
            self.best = ALL
        self.leave()

    def pass_over(
        self, num_tokens: float, num_rounds: int, seconds: float | None, is_settled: bool, num_unread: int = 0
    ) -> bool:
        """Count a pass; returns whether the arm of the following rounds is another one.

        `seconds` since the previous pass, None if the verifier was idle. `is_settled`: the pass ran as the arm says.
        `num_unread`: tokens that drafters would have to read before they can draft.
        """
        if seconds is None:
            return False
        self.budget.credit_s += TRIAL_COST * seconds
        this, before = Block(1, num_rounds, num_tokens, seconds), self.current
        if self._trial is not None:
            self._trial.add(this, fade=1)
        if self._settled < self._to_settle and self._unsettled < LONGEST_SETTLING:
            self._settled += is_settled
            self._unsettled += 1
            self._give_up()
            return self.current != before
        block = self._block
        block.add(this, fade=1)
        is_full = block.passes >= BLOCK_PASSES and block.rounds >= BLOCK_ROUNDS
        if not is_full and not self._is_sure():
            return False
        if self.is_trial:
            self._trial_over()
        else:
            self._block_over()
            self._begin_trial(num_unread)
        self._block = Block()
        self.hold()
        self._to_settle = SETTLED_PASSES if self.current != before else 0
        return self.current != before

    def _is_sure(self) -> bool:
        """Whether a trial need not go on."""
        block = self._block
        if not self.is_trial:
            return False
        noise = NOISE * math.sqrt(max(BLOCK_ROUNDS / block.rounds, SETTLED_PASSES / block.passes))
        log_ratio = math.log(block.rate / self.blocks[self.best].rate)
        return abs(self._advantage(self.current, log_ratio)) > SURELY * noise

    def _advantage(self, arm: Arm, log_ratio: float) -> float:
        """Logarithm of an arm's tokens per second over the best one's with prompts, from that without them."""
        before = self.blocks.get(self.best)
        if before is None or not before.tokens:
            return log_ratio
        token_s, (plain_s, asking_s) = 1 / before.rate, self.other_s
        usual_s = token_s + (plain_s if self.best == OFF else asking_s)
        return math.log(usual_s / (token_s * math.exp(-log_ratio) + (plain_s if arm == OFF else asking_s)))

    def _known(self, arm: Arm) -> tuple[float, float]:
        """Mean advantage of an arm over the best one, and its standard error."""
        comparison, sign = self._compared(arm)
        return self._advantage(arm, sign * comparison.mean), comparison.error

    def _lost_s(self, trial: _Trial) -> float:
        """Seconds that a trial has cost so far."""
        usual = self.blocks.get(self.best, trial)
        return max(LEAST_COST * trial.seconds, trial.seconds - trial.tokens / usual.rate)

    def _give_up(self) -> None:
        """End a trial of more drafters that loses too much before its block begins."""
        trial = self._trial
        if trial is None or not self.is_trial or not self._is_larger(self.current):
            return
        if self._block.passes or trial.unread < FEW_TOKENS:
            return
        if (lost_s := self._lost_s(trial)) > trial.most_lost_s and not trial.is_free:
            # More was left to read.
            self.budget.add(trial.unread, max(lost_s, 2 * self.budget.reading_s(trial.unread)))
            self.leave()

    def _block_over(self) -> None:
        """Count a block of the best arm, and charge the trial before it."""
        if self._is_adjacent:
            self.blocks[self.best].add(self._block)
        else:
            self.blocks[self.best], self._is_adjacent = self._block, True
        trial, self._trial = self._trial, None
        if trial is not None and not trial.is_free:
            self.budget.credit_s = min(0.0, self.budget.credit_s - self._lost_s(trial))

    def _trial_over(self) -> None:
        block, before, trial = self._block, self.blocks[self.best], self._trial
        self.blocks[self.current] = block
        if trial is not None and trial.unread >= FEW_TOKENS:
            # Of what was lost before the block, what is not the arm's own.
            usual_s = (trial.tokens - block.tokens) / min(block.rate, before.rate)
            self.budget.add(trial.unread, trial.seconds - block.seconds - usual_s)
        comparison, sign = self._compared(self.current)
        comparison.add(sign * math.log(block.rate / before.rate))
        advantage, error = self._known(self.current)
        least = error if self._is_larger(self.current) else -error / 2 if self.current else 0.0
        if advantage > least:
            self.best = self.current
        self.current = self.best

    def _begin_trial(self, num_unread: int) -> None:
        arm = max(self._challengers(), key=self._promise)
        advantage, error = self._known(arm)
        before, budget = self.blocks[self.best], self.budget
        reading_s = budget.reading_s(num_unread) if self._is_larger(arm) else 0.0
        passes = SETTLED_PASSES + max(BLOCK_PASSES, BLOCK_ROUNDS * before.passes / before.rounds)
        pass_s = before.pass_s + before.tokens / before.passes * self.other_s[self.best != OFF]
        block_s = max(LEAST_COST, 1 - math.exp(advantage)) * passes * pass_s
        # Never slower than plain decoding comes first; among drafters, one that has become good is soon found.
        errors_worse = -advantage / error if self.best == OFF else 1.0
        wait_s = reading_s + block_s * max(1.0, errors_worse)
        is_due = self._is_due(arm) and (not reading_s or budget.credit_s >= reading_s)
        if is_due or budget.credit_s >= wait_s:
            self.current = arm
            most_lost_s = 2 * (reading_s + block_s)
            # What was saved up for certainty is not there to be lost.
            if errors_worse <= 1:
                most_lost_s = max(most_lost_s, budget.credit_s)
            self._trial = _Trial(unread=num_unread, most_lost_s=most_lost_s, is_free=self._is_new(arm))

    def _is_new(self, arm: Arm) -> bool:
        """Whether it is none or the best drafter, and was not compared at this load: such trials are free."""
        leader = max(self._kinds, key=lambda kind: self._guessed.get(kind, 0.0), default="")
        return arm in (OFF, (leader,)) and self._compared(arm)[0].weight < 1

    def _is_due(self, arm: Arm) -> bool:
        """Whether to try an arm at once: a new one, or what looks better until that is certain."""
        advantage, error = self._known(arm)
        return self._is_new(arm) or 2 * advantage > error

    def _promise(self, arm: Arm) -> tuple[bool, float, float]:
        """Whether an arm is due, the upper bound of its advantage, and how well its drafters guess."""
        advantage, error = self._known(arm)
        kinds = self._kinds if arm == ALL else arm
        guessed = sum(self._guessed.get(kind, 0.0) for kind in kinds) / max(1, len(kinds))
        return self._is_due(arm), advantage + 2 * error, guessed

    def _is_larger(self, arm: Arm) -> bool:
        """Whether an arm asks at least as many drafters as the best one."""
        size, best = (len(self._kinds) or 1 if one == ALL else len(one) for one in (arm, self.best))
        return size >= best

    def _challengers(self) -> list[Arm]:
        best = set(self._kinds if self.best == ALL else self.best)
        arms = {OFF, ALL, *((kind,) for kind in self._kinds)}
        if best:
            changed = (best ^ {kind} for kind in self._kinds)
            arms |= {ALL if len(kinds) == len(self._kinds) else tuple(sorted(kinds)) for kinds in changed}
        return sorted(arms - {self.best})

    def _compared(self, arm: Arm) -> tuple[_Comparison, int]:
        """The comparison of an arm with the best one, and 1 or, if it is that of the best to the arm, -1."""
        pair, sign = ((arm, self.best), 1) if arm < self.best else ((self.best, arm), -1)
        return self._comparisons.setdefault(pair, _Comparison()), sign
