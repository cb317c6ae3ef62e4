"""Choice among several sources: the best alone, and others whose own accepted tokens are worth their time. Seeded."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from coppice.core.tree import ROOT, TokenTree
from orchestrator.planner.passes import PassSample
from orchestrator.planner.source_comparison import ComparisonPace, SourceComparison
from orchestrator.planner.source_value import RATE, SourceValue

# Least tokens per round added by a source: covers messages and merging, which pass times do not show.
LEAST_ADDED = 0.02
# Relative margin before a source's share changes direction.
HYSTERESIS = 0.2
# Passes between changes of shares by a factor of two; below the least share a source is dropped.
PASSES_PER_CHANGE = 8
LEAST_SHARE = 0.25
# A dropped source is tried by one request, together with the asked ones, for this many rounds with its trees, or
# LONGEST_TRIAL passes. The first trial comes after FIRST_TRIAL_AFTER passes; intervals double until trials take
# TRIAL_SHARE of all passes, which wait for all asked sources.
TRIAL_ROUNDS = 12
TRIAL_SHARE = 0.03
LONGEST_TRIAL = 48
FIRST_TRIAL_AFTER = 128
# Every source is paused for this many passes in turn, which measures its cost; intervals double after each cycle.
PAUSE_PASSES = 4
FIRST_PAUSE_AFTER = 8
LONGEST_BETWEEN_PAUSES = 512
# Multiples of the golden ratio spread requests evenly over [0, 1).
_GOLDEN = 0.6180339887498949

# Not a request's number.
_NOBODY = 0

NONE_LEFT_OUT: frozenset[str] = frozenset()


class SourceChoice:
    """Chooses among the drafters of one verifier's requests.

    A source pays while (tokens per round with it) / (tokens without it) exceeds (round time with it) / (time without
    it). Its added tokens are counted: accepted tokens that no other source proposed, which end an accepted path; late
    trees add none. Its cost is measured in pauses: rows, contention, and others.

    First, sources are compared, each alone and all together: on shared processors, all together may gain nothing
    although the best alone gains much. Then others are tried besides the asked ones.

    One source's share changes at a time, so that one of two redundant sources stays; one is always asked. Unused with a
    single source.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._sources: dict[str, SourceValue] = {}
        # None before there is a choice, and after the comparison.
        self._comparison: SourceComparison | None = None
        # Sources by rank alone; empty before the comparison.
        self._ranked: list[str] = []
        self._pace = ComparisonPace()
        # Drafting trials that found no gain, and led to no comparison.
        self._num_vain = 0
        self._tokens = 1.0
        self._since_change = 0
        self._paused: str | None = None
        self._pause_left = 0
        self._between_pauses = self._until_pause = float(FIRST_PAUSE_AFTER)
        self._trial: _Trial | None = None
        self._between_trials = self._until_trial = float(FIRST_TRIAL_AFTER)
        # Comparisons begun.
        self.num_comparisons = 0
        # Asking rounds of the current pass by source.
        self._asked: dict[str, int] = {}

    @property
    def is_comparing(self) -> bool:
        """Whether sources are being compared."""
        return self._comparison is not None

    @property
    def has_asked(self) -> bool:
        """Whether requests with a choice asked for drafts in the current pass."""
        return bool(self._asked)

    @property
    def is_trying(self) -> bool:
        """Whether a request tries a dropped source."""
        return self._trial is not None

    @property
    def shares(self) -> dict[str, float]:
        """Share of requests that ask each source, without trials and pauses; empty before there is a choice."""
        if self._comparison is not None:
            return {name: float(name in self._comparison.turn) for name in self._comparison.ranked}
        return {name: self._sources[name].share for name in self._ranked}

    def left_out(self, number: int, sources: Sequence[str]) -> frozenset[str]:
        """Sources that the request of this number does not ask in its next round."""
        if not self._ranked and self._comparison is None:
            self._begin_comparison(sources)
        if self._comparison is not None:
            others = frozenset(sources).difference(self._comparison.turn)
            # If the source under test is gone, another one is asked.
            return others if len(others) < len(sources) else others - {sources[0]}
        place = number * _GOLDEN % 1.0
        out = {name for name in sources if name == self._paused or place >= self._source(name).share}
        if self._trial is not None and self._trial.number == number:
            out.discard(self._trial.name)
        if len(out) == len(sources):
            out.remove(min(out, key=self._ranked.index))
        return frozenset(out) if out else NONE_LEFT_OUT

    def is_tried_by(self, number: int) -> bool:
        """Whether a request tries a dropped source, so that all of its rounds must be learned from."""
        return self._trial is not None and self._trial.number == number

    def count(self, number: int, sources: Sequence[str], left_out: frozenset[str]) -> None:
        """Count an asking round of a request."""
        for name in sources:
            if name not in left_out:
                self._asked[name] = self._asked.get(name, 0) + 1
        if self._comparison is not None or not self._ranked:
            return
        for name in sources:
            self._source(name)
        trial = self._trial
        if trial is not None and trial.number == _NOBODY and trial.name in left_out:
            trial.number = number
        elif trial is None and self._until_trial <= 0:
            self._begin_trial(number, sources)

    def learn(
        self,
        number: int,
        sources: Sequence[str],
        left_out: frozenset[str],
        trees: Sequence[TokenTree],
        verified: AcceptedPath,
        promised: float,
    ) -> None:
        """Learn from a round that asked for drafts.

        `trees` are those sent for it, `promised` is the verified tree's expected tokens.
        """
        self._tokens += RATE * (verified.num_tokens - self._tokens)
        if self._comparison is not None:
            asked = {name for name in sources if name not in left_out}
            if asked == set(self._comparison.turn):
                come = {name for tree in trees for name in tree.source_names} & asked
                self._comparison.learn(promised, verified.num_accepted, come)
            return
        if not self._ranked:
            return
        trial = self._trial if self.is_tried_by(number) else None
        for name in sources:
            if name in left_out:
                continue
            added = verified.added_by(name, sources)
            if trial is not None and name == trial.name:
                self._learn_in_trial(trial, added, has_come=any(name in tree.source_names for tree in trees))
            elif self._paused is None:
                # During a pause, others add the paused source's tokens too.
                self._source(name).learn(added)

    def pass_over(self, record: PassSample, num_running: int, may_compare: bool, plain: float = 0.0) -> bool:
        """Learn a pass's time and apply due changes; returns whether it ended a comparison.

        `may_compare`: few enough requests are running for all to change sources. `plain` is a request's tokens per
        second without drafts, or 0.
        """
        asked, self._asked = self._asked, {}
        self._pace.pass_over()
        if self._trial is not None:
            self._trial.num_passes += 1
            if self._trial.num_passes >= LONGEST_TRIAL:
                self._end_trial(self._trial)
        if not asked or not (self._ranked or self.is_comparing):
            return False
        seconds = None if record.gap_s is None else record.pass_s + record.gap_s
        if self._comparison is not None:
            return self._compare(self._comparison, set(asked), None if record.reads_prompt else seconds, plain)
        if seconds is not None:
            for name, source in self._sources.items():
                source.took(seconds, asked.get(name, 0) / max(1, record.num_asked), num_running, record.is_joint)
        self._pause_or_go_on(asked)
        self._until_trial -= 1
        self._since_change += 1
        if self._since_change >= PASSES_PER_CHANGE:
            self._change_one(list(asked))
        self._pace.drafted(self._tokens)
        if may_compare and self._pace.is_due_for(self._tokens):
            self._compare_anew()
        return False

    def trial_over(self, found_gain: bool, may_compare: bool) -> None:
        """Count a drafting trial with the asked sources; `may_compare` as in `pass_over`."""
        if self._comparison is not None or not self._ranked:
            return
        if found_gain:
            self._pace.found_gain()
        elif may_compare and self._pace.is_due:
            self._compare_anew()
        else:
            # Next, try another source; every second time the best one.
            self._num_vain += 1
            place = 0 if self._num_vain % 2 == 0 else 1 + self._num_vain // 2 % (len(self._ranked) - 1)
            self._ask((self._ranked[place],))

    def request_ended(self, number: int) -> None:
        """Let the next request continue an ended request's trial."""
        if self._trial is not None and self._trial.number == number:
            self._trial.number = _NOBODY

    def _source(self, name: str) -> SourceValue:
        source = self._sources.get(name)
        if source is None:
            source = self._sources[name] = SourceValue()
            if name not in self._ranked:
                self._ranked.append(name)
        return source

    def _compare_anew(self) -> None:
        self._begin_comparison(self._ranked)
        self._pace.begun_anew()

    def _begin_comparison(self, names: Sequence[str]) -> None:
        self._comparison, self._trial, self._paused = SourceComparison(names), None, None
        self.num_comparisons += 1

    def _compare(self, comparison: SourceComparison, asked: set[str], seconds: float | None, plain: float) -> bool:
        """Count a pass of the comparison; returns whether it is over."""
        comparison.pass_over(seconds if asked == set(comparison.turn) else None, plain)
        if not comparison.is_over:
            return False
        self._comparison, self._ranked = None, comparison.ranked
        self._pace.over()
        self._ask(comparison.turn)
        return True

    def _ask(self, names: Sequence[str]) -> None:
        for name in self._ranked:
            self._source(name).share = float(name in names)
        self._pace.sources_changed()

    def _begin_trial(self, number: int, sources: Sequence[str]) -> None:
        untried = [name for name in sources if self._source(name).share == 0]
        if not untried:
            return
        fewest = min(self._source(name).num_trials for name in untried)
        name = self._random.choice([name for name in untried if self._source(name).num_trials == fewest])
        self._source(name).num_trials += 1
        self._trial = _Trial(number, name)

    def _learn_in_trial(self, trial: _Trial, added: int, has_come: bool) -> None:
        # Rounds before the source's first tree, during prefill, do not count.
        if trial.num_with_trees or has_come:
            trial.num_with_trees += 1
            trial.added += added
        if trial.num_with_trees >= TRIAL_ROUNDS:
            self._end_trial(trial)

    def _end_trial(self, trial: _Trial) -> None:
        """Ask the tried source if it pays; without trees it has added nothing."""
        self._trial = None
        self._between_trials = min(2 * self._between_trials, trial.num_passes / TRIAL_SHARE)
        self._until_trial = self._between_trials * self._random.uniform(0.75, 1.25)
        source = self._source(trial.name)
        source.added = trial.added / TRIAL_ROUNDS
        if self._surplus(source) > HYSTERESIS * self._needed(source):
            source.share = LEAST_SHARE
            self._pace.sources_changed()
            self._between_trials = float(FIRST_TRIAL_AFTER)

    def _needed(self, source: SourceValue) -> float:
        """Least added tokens per round that cover a source's cost."""
        return max(LEAST_ADDED, source.cost) * max(1.0, self._tokens - source.added * (source.share > 0))

    def _surplus(self, source: SourceValue) -> float:
        return source.added - self._needed(source)

    def _pause_or_go_on(self, asked: dict[str, int]) -> None:
        if self._paused is not None:
            self._pause_left -= 1
            if self._pause_left <= 0:
                self._paused = None
            return
        self._until_pause -= 1
        everywhere = [name for name in asked if self._sources[name].share == 1]
        if self._until_pause > 0 or len(everywhere) < 2:
            return
        self._paused = min(everywhere, key=lambda name: self._sources[name].num_pauses)
        self._pause_left = PAUSE_PASSES
        self._sources[self._paused].num_pauses += 1
        if len({self._sources[name].num_pauses for name in everywhere}) == 1:
            self._between_pauses = min(LONGEST_BETWEEN_PAUSES, 2 * self._between_pauses)
        self._until_pause = self._between_pauses * self._random.uniform(0.75, 1.25)

    def _change_one(self, names: Sequence[str]) -> None:
        """Halve or double one share: of a source in transition, else of the one that pays least."""
        self._since_change = 0
        known = [source for name in names if (source := self._sources[name]).is_known]
        under_way = [source for source in self._sources.values() if 0 < source.share < 1]
        if under_way:
            source = under_way[0]
            self._shift(source, up=self._surplus(source) > 0)
        elif len(known) > 1:
            worst = min(known, key=self._surplus)
            if self._surplus(worst) < -HYSTERESIS * self._needed(worst):
                self._shift(worst, up=False)

    def _shift(self, source: SourceValue, up: bool) -> None:
        source.share = min(1.0, 2 * source.share) if up else source.share / 2
        if source.share < LEAST_SHARE:
            source.share = 0.0
        self._pace.sources_changed()


class AcceptedPath:
    """Sources that proposed the nodes of a verified tree's accepted path."""

    def __init__(self, tree: TokenTree | None, token_ids: Sequence[int], num_accepted: int) -> None:
        """`token_ids` are the committed tokens, the first `num_accepted` of them nodes of the tree."""
        self.num_tokens = len(token_ids)
        self.num_accepted = num_accepted
        self._proposers: list[tuple[str, ...]] = []
        if tree is None:
            return
        node = ROOT
        for token in token_ids[:num_accepted]:
            node = tree.children.get((node, token), ROOT)
            if node == ROOT:
                break
            self._proposers.append(tree.sources_of(node))

    def added_by(self, name: str, sources: Sequence[str]) -> int:
        """Accepted nodes proposed by `name` and by no other of `sources`."""
        others = [other for other in sources if other != name]
        return sum(
            name in proposers and not any(other in proposers for other in others) for proposers in self._proposers
        )


@dataclass
class _Trial:
    """One request's trial of a dropped source."""

    number: int
    name: str
    num_passes: int = 0
    num_with_trees: int = 0
    added: int = 0
