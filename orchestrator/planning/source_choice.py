"""Which of several sources to ask: each as long as what it alone adds is worth the time that it costs. Seeded."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from coppice.tree import ROOT, TokenTree
from orchestrator.planning.cost_model import PassRecord

# What a source has to add to the tokens of a round, at least: its messages and the merging take time that passes do
# not show.
LEAST_ADDED = 0.02
# A source changes its direction only when it is this clear that it should.
HYSTERESIS = 0.2
# Passes between two changes of shares, of which one halves or doubles; below the least share a source is dropped.
PASSES_PER_CHANGE = 8
LEAST_SHARE = 0.25
# Rounds that a source is known from before its share changes, and what it is taken to add until then.
FEWEST_ROUNDS = 16
_PRIOR_ROUNDS = 2
_PRIOR_ADDED = 0.5
# Weight of a round in running means.
_RATE = 1 / 32
# A source that is dropped is tried by one request for so many rounds with its trees, as often as this share of all
# rounds allows; one whose trees do not come within the longest trial has added nothing.
TRIAL_ROUNDS = 12
TRIAL_SHARE = 0.03
LONGEST_TRIAL = 48
# Every source is left out for so many passes in a row now and then, in turns, which shows what it costs: first after so
# many passes, and when all have had their turn after twice as many.
PAUSE_PASSES = 4
FIRST_PAUSE_AFTER = 8
LONGEST_BETWEEN_PAUSES = 512
# A number of requests that differs by more than this share is another load; a pass counts as this many usual ones at
# most.
_SAME_LOAD = 0.25
_OUTLIER = 3.0
_FEWEST_PASSES = 3
# What is left of the weight of times with each pass without new ones, and how many passes count for no difference.
_FADE = 1 - 1 / 512
_DOUBTED_PASSES = 12.0
# Requests are spread evenly over [0, 1) by multiples of the golden ratio.
_GOLDEN = 0.6180339887498949

NONE_LEFT_OUT: frozenset[str] = frozenset()


class SourceChoice:
    """Chooses among the drafters of one verifier's requests.

    A source pays while (tokens of a round with it) / (tokens without it) is above (time of a round with it) / (time
    without it). What it adds is counted: accepted tokens that no other source had proposed, which are the last of an
    accepted path, late trees counting for nothing. What it costs shows in pauses: rows, contention, and whatever else.

    One source at a time changes its share of the requests, so that of two that say the same one stays; and one is
    always asked. With a single source, none of this is ever called.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._sources: dict[str, _Source] = {}
        self._tokens = 1.0
        self._num_learned = 0
        self._since_change = 0
        self._paused: str | None = None
        self._pause_left = 0
        self._between_pauses = self._until_pause = float(FIRST_PAUSE_AFTER)
        self._trial: _Trial | None = None
        self._until_trial = 0.0
        # Of the pass that goes on: rounds that asked, by source.
        self._asked: dict[str, int] = {}

    def left_out(self, number: int, sources: Sequence[str]) -> frozenset[str]:
        """The sources that a request, known by its number, does not ask in its next round."""
        place = number * _GOLDEN % 1.0
        out = [name for name in sources if name == self._paused or place >= self._source(name).share]
        if self._trial is not None and self._trial.number == number and self._trial.name in out:
            out.remove(self._trial.name)
        return frozenset(out) if 0 < len(out) < len(sources) else NONE_LEFT_OUT

    def is_tried_by(self, number: int) -> bool:
        """Whether a request tries a source that was dropped, so that all of its rounds have to be learned from."""
        return self._trial is not None and self._trial.number == number

    def count(self, number: int, sources: Sequence[str], left_out: frozenset[str]) -> None:
        """A round of a request that had asked for drafts is over."""
        shares = [self._source(name).share for name in sources]
        for name in sources:
            if name not in left_out:
                self._asked[name] = self._asked.get(name, 0) + 1
        if self._trial is None and 0 in shares:
            self._until_trial -= 1
            if self._until_trial <= 0:
                self._begin_trial(number, sources)

    def learn(
        self,
        number: int,
        sources: Sequence[str],
        left_out: frozenset[str],
        trees: Sequence[TokenTree],
        verified: Verified,
    ) -> None:
        """Learn from a round that had asked for drafts; `trees` are those that were sent for it."""
        self._tokens += _RATE * (verified.num_tokens - self._tokens)
        trial = self._trial if self.is_tried_by(number) else None
        for name in sources:
            if name in left_out:
                continue
            added = verified.added_by(name, sources)
            if trial is not None and name == trial.name:
                self._learn_in_trial(trial, added, has_come=any(name in tree.source_names for tree in trees))
            elif self._paused is None:
                # Beside one that pauses it adds what that one would have said, too.
                self._source(name).learn(added)

    def pass_over(self, record: PassRecord, num_running: int) -> None:
        """A pass has ended: learn its time, and change what is due."""
        asked, self._asked = self._asked, {}
        if not asked:
            return
        if record.gap_s is not None:
            for name, source in self._sources.items():
                source.took(record.pass_s + record.gap_s, asked.get(name, 0) / max(1, record.num_asked), num_running)
        self._pause_or_go_on(asked)
        self._since_change += 1
        if self._since_change >= PASSES_PER_CHANGE:
            self._change_one(list(asked))

    def request_ended(self, number: int) -> None:
        """A request that may have had a trial has ended; another may have it soon."""
        if self.is_tried_by(number):
            self._trial, self._until_trial = None, TRIAL_ROUNDS

    def _source(self, name: str) -> _Source:
        source = self._sources.get(name)
        if source is None:
            source = self._sources[name] = _Source()
        return source

    def _begin_trial(self, number: int, sources: Sequence[str]) -> None:
        name = self._random.choice([name for name in sources if self._source(name).share == 0])
        self._trial = _Trial(number, name)

    def _learn_in_trial(self, trial: _Trial, added: int, has_come: bool) -> None:
        trial.num_rounds += 1
        # Drafters read first what they were not told.
        if trial.num_with_trees or has_come:
            trial.num_with_trees += 1
            trial.added += added
        if trial.num_with_trees < TRIAL_ROUNDS and trial.num_rounds < LONGEST_TRIAL:
            return
        self._trial = None
        self._until_trial = trial.num_rounds / TRIAL_SHARE * self._random.uniform(0.75, 1.25)
        source = self._source(trial.name)
        source.added = trial.added / TRIAL_ROUNDS
        if self._surplus(source) > HYSTERESIS * self._needed(source):
            source.share = LEAST_SHARE

    def _needed(self, source: _Source) -> float:
        """Tokens per round that a source has to add, for what it costs."""
        return max(LEAST_ADDED, source.cost) * max(1.0, self._tokens - source.added * (source.share > 0))

    def _surplus(self, source: _Source) -> float:
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
        """Halve or double one share: of a source that is on its way, else of the one that pays least."""
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
                return
        dropped = [source for name in names if (source := self._sources[name]).share == 0]
        if dropped and not under_way:
            # Learned where drafting as a whole was tried.
            best = max(dropped, key=self._surplus)
            if self._surplus(best) > HYSTERESIS * self._needed(best):
                best.share = LEAST_SHARE

    def _shift(self, source: _Source, up: bool) -> None:
        source.share = min(1.0, 2 * source.share) if up else source.share / 2
        if source.share < LEAST_SHARE:
            source.share = 0.0
            self._until_trial = TRIAL_ROUNDS / TRIAL_SHARE


class Verified:
    """A verified tree's accepted path: which sources had proposed its nodes."""

    def __init__(self, tree: TokenTree | None, token_ids: Sequence[int], num_accepted: int) -> None:
        """`token_ids` are those committed, of which the first `num_accepted` are nodes of the tree."""
        self.num_tokens = len(token_ids)
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
        """Accepted nodes that of these sources only the one named had proposed."""
        others = [other for other in sources if other != name]
        return sum(
            name in proposers and not any(other in proposers for other in others) for proposers in self._proposers
        )


@dataclass
class _Trial:
    """One request's trial of a source that was dropped."""

    number: int
    name: str
    num_rounds: int = 0
    num_with_trees: int = 0
    added: int = 0


@dataclass
class _RoundTime:
    """A running mean of times of rounds, at one load; `weight` is in passes."""

    load: int = 0
    weight: float = 0.0
    seconds: float = 0.0

    def is_at(self, load: int) -> bool:
        """Whether it is of about so many requests."""
        return abs(load - self.load) <= _SAME_LOAD * self.load

    def add(self, seconds: float, load: int) -> None:
        """A round took so long while so many requests ran."""
        if not self.is_at(load):
            self.load, self.weight = load, 0.0
        if self.weight >= _FEWEST_PASSES:
            seconds = min(seconds, _OUTLIER * self.seconds)
        self.weight += 1
        self.seconds += max(_RATE, 1 / self.weight) * (seconds - self.seconds)

    def fade(self) -> None:
        """A pass of the other kind has gone by, since when this is less certain."""
        self.weight *= _FADE


@dataclass
class _Source:
    """What is known of one source, and the share of requests that ask it."""

    share: float = 1.0
    # Accepted tokens per round that it alone had proposed, from so many rounds.
    added: float = _PRIOR_ADDED
    num_rounds: int = 0
    num_pauses: int = 0
    beside: _RoundTime = field(default_factory=_RoundTime)
    without: _RoundTime = field(default_factory=_RoundTime)

    @property
    def is_known(self) -> bool:
        """Whether there is enough to judge it by."""
        return self.num_rounds >= FEWEST_ROUNDS and self.without.weight > 0

    @property
    def cost(self) -> float:
        """The share by which it makes rounds longer, as far as that is certain."""
        beside, without = self.beside, self.without
        if not beside.weight or not without.weight or not without.is_at(beside.load):
            return 0.0
        weight = min(beside.weight, without.weight)
        return max(0.0, beside.seconds / without.seconds - 1) * weight / (weight + _DOUBTED_PASSES)

    def learn(self, added: int) -> None:
        """It was asked for a round, and had alone proposed so many of its accepted tokens."""
        self.num_rounds += 1
        self.added += max(_RATE, 1 / (_PRIOR_ROUNDS + self.num_rounds)) * (added - self.added)

    def took(self, seconds: float, share: float, load: int) -> None:
        """A pass took so long, and this share of its rounds that had asked for drafts had asked for its."""
        if share >= 0.5:
            self.beside.add(seconds, load)
            self.without.fade()
        elif share == 0:
            self.without.add(seconds, load)
            self.beside.fade()
