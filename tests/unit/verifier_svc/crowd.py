"""Drives an engine turn by turn in the test's own thread: many sequences at random, each with a known output."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from coppice.core.sampling import SamplingParams, StoppingOptions
from coppice.core.tree import EMPTY_TREE, TokenTree
from tests.unit.verifier_svc.oracles import random_tree, tree_around
from verifier_svc.engine.engine import Engine
from verifier_svc.engine.kv_cache import KVCache
from verifier_svc.engine.scheduler import Scheduler, SchedulerLimits
from verifier_svc.engine.sequence import Draft, Sequence, SequenceKey, SequenceSpec
from verifier_svc.model.target_model import TargetInfo, TargetModel
from verifier_svc.stream.events import ErrorEvent, Event, OutcomeEvent
from verifier_svc.verify.output_end import SequenceFinish

STREAM = 1
MAX_NODES = 16


class Clock:
    """A clock that goes on by a tenth of a millisecond with each look."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def __call__(self) -> float:
        self._now_s += 1e-4
        return self._now_s


@dataclass(frozen=True)
class Case:
    """A request, and what it gets alone in a large cache."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    stopping: StoppingOptions
    salt: str = ""
    output: tuple[int, ...] = ()
    finish: SequenceFinish | None = None


@dataclass
class Open:
    """A sequence of the crowd: its case, the first `num_resumed` output tokens given with the prompt."""

    case: Case
    num_resumed: int
    tokens: list[int] = field(default_factory=list)
    finish: SequenceFinish | None = None
    is_cancelled: bool = False


class Crowd:
    """Sequences that join, leave, get drafts and lose their blocks at random; every event is checked as it comes."""

    def __init__(
        self,
        target: TargetModel,
        info: TargetInfo,
        limits: SchedulerLimits,
        seed: int,
        max_nodes: int = MAX_NODES,
    ) -> None:
        self._cache: KVCache = target.cache
        self._vocab_size = info.vocab_size
        self._max_nodes = max_nodes
        self._redraft_nodes = 0 if info.redraft is None else info.redraft.max_nodes
        self.engine = Engine(target, info, limits, max_nodes, Clock())
        self.scheduler: Scheduler = self.engine.scheduler
        self._generator = np.random.default_rng(seed)
        self._open: dict[int, Open] = {}
        self._live: set[int] = set()
        self._arrived: list[Event] = []
        self.counts: Counter[str] = Counter()
        self.engine.attach(STREAM, self._arrived.extend)

    def join(self, case: Case, *, num_resumed: int = 0, priority: int = 0, linger_s: float = 0.0) -> None:
        """Open a sequence."""
        number = len(self._open)
        self._open[number] = Open(case, num_resumed)
        self._live.add(number)
        prompt = (*case.prompt, *case.output[:num_resumed])
        spec = SequenceSpec(
            prompt,
            case.sampling,
            case.stopping,
            num_resumed,
            linger_s,
            priority,
            case.salt,
            max_redraft_nodes=self._redraft_nodes,
        )
        self.engine.open(SequenceKey(STREAM, number), spec)
        self.counts["joins"] += 1

    def cancel(self) -> None:
        """Close one of the sequences, one that was preempted and waits where there is one."""
        preempted = self._preempted()
        self.counts["cancelled while preempted"] += len(preempted) > 0
        number = preempted[0] if preempted else self._any()
        self._open[number].is_cancelled = True
        self._live.discard(number)
        self.engine.close(SequenceKey(STREAM, number))
        self.counts["cancels"] += 1

    def draft(self) -> None:
        """Send one of the sequences a tree: right, half right or wrong; in time, late or early."""
        generator = self._generator
        number = self._any()
        sequence = self._open[number]
        case, done = sequence.case, sequence.num_resumed + len(sequence.tokens)
        start = max(0, min(done + int(generator.choice([-3, -1, 0, 0, 0, 0, 0, 2])), len(case.output)))
        path = list(case.output[start : start + int(generator.integers(1, 14))])
        kind = generator.integers(8)
        if kind == 0:
            tree: TokenTree = EMPTY_TREE
        elif kind == 1:
            tree = random_tree(generator, self._vocab_size, int(generator.integers(1, 30)))
        else:
            if kind == 2 and path:
                path[-1] = (path[-1] + 1) % self._vocab_size
            tree = tree_around(generator, path, self._vocab_size, num_decoys=1)
        budget = None if generator.random() < 0.8 else int(generator.integers(1, self._max_nodes + 4))
        linger_s = None if generator.random() < 0.9 else float(generator.choice([0.0, 5e-4]))
        draft = Draft(len(case.prompt) + start, tree, budget, linger_s)
        self.engine.submit(SequenceKey(STREAM, number), draft)
        self.counts["drafts"] += 1

    def preempt(self) -> None:
        """Take the blocks of the last in rank away, whether others need them or not; never those of the first."""
        if len(self.scheduler._running) > 1:
            self.scheduler._preempt_last()
            self.counts["forced preemptions"] += 1

    def turn(self) -> None:
        """One turn of the engine."""
        # Without a sequence it would wait for commands for good.
        if not self._live and self.engine._commands.empty():
            return
        self.engine.step()
        # What the next pass would deliver on its way.
        self.engine._deliver()
        for event in self._arrived:
            self._check(event)
        self._arrived.clear()
        self._check_blocks()

    def finish(self) -> None:
        """Turn until every sequence has ended."""
        turns = 0
        while self._live:
            self.turn()
            turns += 1
            assert turns < 20_000, "no progress"
        while not self.engine._commands.empty():
            self.engine._take_commands()

    @property
    def num_live(self) -> int:
        """Sequences that have neither ended nor been cancelled."""
        return len(self._live)

    def check_outputs(self) -> None:
        """Every sequence that was not cancelled has got exactly what it gets alone."""
        for number, sequence in self._open.items():
            if not sequence.is_cancelled:
                assert tuple(sequence.tokens) == sequence.case.output[sequence.num_resumed :], number
                assert sequence.finish == sequence.case.finish, number
                self.counts["ended by a stop string"] += bool(
                    sequence.case.stopping.stop_strings and sequence.finish and sequence.finish.stop_match
                )

    def check_nothing_is_left(self) -> None:
        """No sequence, no user of a block; and every block can be had once, which empties the prefix cache, too."""
        assert self.scheduler.all_keys() == []
        assert self._cache._num_users == [0] * self._cache.num_blocks
        assert self._cache.num_free_blocks == self._cache.num_blocks
        blocks = [self._cache.take_block() for _ in range(self._cache.num_blocks)]
        assert sorted(blocks) == list(range(self._cache.num_blocks))
        assert self._cache.num_free_blocks == 0
        assert not self._cache._published
        assert not self._cache._digests
        if (states := self._cache.states) is not None:
            assert states.num_free == states.num_running
            assert states.num_borders == 0
            assert len(states._free_kept) == states.num_kept
        self._cache.return_blocks(blocks)
        assert self._cache._num_users == [0] * self._cache.num_blocks

    def _any(self) -> int:
        return int(self._generator.choice(sorted(self._live)))

    def _preempted(self) -> list[int]:
        waiting = [(key, self.scheduler.find(key)) for key in self.scheduler.all_keys()]
        return [
            key.sequence_id
            for key, sequence in waiting
            if sequence and sequence.residence.num_preemptions and not sequence.residence._cache
        ]

    def _check(self, event: Event) -> None:
        assert not isinstance(event, ErrorEvent), event
        if not isinstance(event, OutcomeEvent):
            return
        sequence, outcome = self._open[event.sequence_id], event.outcome
        assert sequence.finish is None, "an outcome after the end"
        done = sequence.num_resumed + len(sequence.tokens)
        assert outcome.base_length == len(sequence.case.prompt) + done
        expected = sequence.case.output[done : done + len(outcome.token_ids)]
        assert outcome.token_ids == expected, f"tokens of sequence {event.sequence_id} from output token {done} on"
        sequence.tokens += outcome.token_ids
        sequence.finish = outcome.finish
        self.counts["tokens"] += len(outcome.token_ids)
        self.counts["nodes"] += outcome.draft_nodes
        self.counts["accepted"] += len(outcome.accepted_nodes)
        if outcome.finish is not None:
            self._live.discard(event.sequence_id)
            self.counts["leaves"] += 1
            self.counts["prefix hits"] += event.cached_tokens > 0

    def _check_blocks(self) -> None:
        """Each block has as many users as running sequences name it; those that wait own none."""
        users = Counter(block for running in self.scheduler._running.values() for block in self._table(running))
        assert [users[block] for block in range(self._cache.num_blocks)] == self._cache._num_users
        assert self._cache.num_free_blocks == self._cache.num_blocks - len(users)
        for key in self.scheduler._waiting.keys():  # noqa: SIM118 not a dictionary
            waiting = self.scheduler.find(key)
            assert waiting is not None
            assert waiting.residence._cache is None

    @staticmethod
    def _table(sequence: Sequence) -> list[int]:
        blocks: list[int] = sequence.residence.cache.table.tolist()
        return blocks
