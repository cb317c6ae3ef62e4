"""The scheduler under a constant number of requests, with a modelled cost of rows instead of a clock and a model."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from coppice.core.sampling import SamplingParams, StoppingOptions
from coppice.core.tokenizer import TargetTokenizer
from coppice.core.tree import TokenTree, chain
from tests.unit.verifier_svc.tiny_engine import VOCAB, character_tokenizer
from verifier_svc.engine.kv_cache import KVCache
from verifier_svc.engine.pass_runner import PassPart
from verifier_svc.engine.scheduler import Scheduler, SchedulerLimits
from verifier_svc.engine.sequence import Draft, Sequence, SequenceKey, SequenceSpec
from verifier_svc.model.target_model import TargetInfo

INFO = TargetInfo("toy", character_tokenizer(), "", VOCAB, 8, 2000, (), exact=True)
TOKENIZER = TargetTokenizer(INFO.tokenizer_json)
# Nodes of a draft are right this often, those of the worst drafted sequence and of the best.
LOWEST_RATE, HIGHEST_RATE = 0.8, 0.97


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a pass by itself and for each of its rows, until a client sends its next request, and of drafting.

    The defaults are those of the bundled target on two cores.
    """

    pass_s: float = 0.005
    row_s: float = 0.000165
    client_s: float = 0.002
    draft_s: float = 0.0
    linger_s: float = 0.0


CPU = Costs()
LATE_DRAFTS = Costs(draft_s=0.03, linger_s=0.03)
# As on a device that a few hundred rows do not fill.
CHEAP_ROWS = Costs(pass_s=0.006, row_s=0.000004)


@dataclass
class Counts:
    """What happened after the warm-up; times are by the modelled cost."""

    passes: int = 0
    seconds: float = 0.0
    tokens: int = 0
    rows: Counter[str] = field(default_factory=Counter)
    # Of each request: passes that ended, and time that passed, between its arrival and its first token.
    first_passes: list[int] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    # Between two outcomes of one sequence.
    gaps_s: list[float] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def rows_per_token(self) -> float:
        return self.rows.total() / self.tokens


class ClosedLoop:
    """So many requests at once, drafted by chains of `num_nodes`; the target always says token 0."""

    def __init__(self, concurrency: int, num_nodes: int, costs: Costs | None = None, **limits: int) -> None:
        self.costs = costs or Costs()
        defaults = {"max_sequences": concurrency, "max_queued": 1000, "prefill_chunk": 512}
        self.scheduler = Scheduler(
            KVCache(20 * concurrency, reuses_prefixes=False), SchedulerLimits(**{**defaults, **limits})
        )
        self._num_nodes = num_nodes
        self.now_s = 0.0
        self.counts = Counts()
        self._num_passes = 0
        self._arrived: dict[SequenceKey, tuple[int, float]] = {}
        self._rates: dict[SequenceKey, float] = {}
        self._generators: dict[SequenceKey, np.random.Generator] = {}
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._num_events = 0
        self._pass_ended_s = 0.0
        for number in range(concurrency):
            self._later(number * 0.01, self._request)

    def run(self, num_requests: int, warm_up: int) -> Counts:
        """Go on until so many requests have had their first token after those of the warm-up."""
        while len(self.counts.first_s) < warm_up:
            self._step()
        self.counts = Counts()
        started_s = self.now_s
        while len(self.counts.first_s) < num_requests:
            self._step()
        self.counts.seconds = self.now_s - started_s
        return self.counts

    def _later(self, after_s: float, action: Callable[[float], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (self.now_s + after_s, self._num_events, action))

    def _request(self, due_s: float) -> None:
        number = len(self._rates)
        key = SequenceKey(0, number)
        # The same requests, whatever became of those before.
        generator = self._generators[key] = np.random.default_rng(number)
        prompt = (0,) * int(generator.integers(64, 400))
        stopping = StoppingOptions(max_tokens=int(generator.integers(32, 129)), ignore_eos=True)
        linger_s = self.costs.linger_s if self._num_nodes else 0.0
        spec = SequenceSpec(prompt, SamplingParams(), stopping, linger_s=linger_s)
        self.scheduler.add(key, Sequence(spec, INFO, TOKENIZER, max_nodes=max(1, self._num_nodes), opened_s=due_s))
        # What comes while a pass runs is seen when that has ended.
        self._arrived[key] = (self._num_passes - (due_s < self._pass_ended_s), due_s)
        self._rates[key] = float(generator.uniform(LOWEST_RATE, HIGHEST_RATE))

    def _draft(self, key: SequenceKey, base_length: int) -> None:
        sequence = self.scheduler.find(key)
        if sequence is not None:
            sequence.submit(Draft(base_length, self._tree(key)))

    def _tree(self, key: SequenceKey) -> TokenTree:
        """A chain whose nodes are right as often as it says."""
        rate = self._rates[key]
        num_right = int(self._generators[key].geometric(1 - rate)) - 1
        tokens = [0 if index < num_right else 1 for index in range(self._num_nodes)]
        return chain(tokens, [float(np.log(rate))] * self._num_nodes)

    def _step(self) -> None:
        while self._events and self._events[0][0] <= self.now_s:
            due_s, _, action = heapq.heappop(self._events)
            action(due_s)
        self.scheduler.admit(self.now_s)
        start_s = self.scheduler.next_start_s()
        if start_s is not None and start_s <= self.now_s:
            self._pass()
        else:
            times = [start_s] if start_s is not None else []
            self.now_s = min([*times, *(event[0] for event in self._events[:1])])

    def _pass(self) -> None:
        shares = self.scheduler.next_batch(self.now_s)
        work = [share.sequence.next_rows(share.num_pending, share.max_nodes) for share in shares]
        num_rows = sum(map(len, work))
        self.now_s += self.costs.pass_s + self.costs.row_s * num_rows
        for share, rows in zip(shares, work, strict=True):
            rows.cache.reserve(len(rows))
            was_prompt = share.sequence.is_prefilling
            self.counts.rows["prompts" if was_prompt else "roots"] += share.num_pending
            self.counts.rows["nodes"] += len(rows.tree)
            waited_s = self.now_s - share.sequence.last_outcome_s
            outcome = share.sequence.finish_round(PassPart(_LOGITS[: 1 + len(rows.tree)]), self.now_s, 0.0)
            if outcome is None:
                continue
            self.counts.tokens += len(outcome.token_ids)
            if was_prompt:
                passes, arrived_s = self._arrived[share.key]
                self.counts.first_passes.append(self._num_passes + 1 - passes)
                self.counts.first_s.append(self.now_s - arrived_s)
            else:
                self.counts.gaps_s.append(waited_s)
            if outcome.finish is not None:
                self.scheduler.remove(share.key)
                self._later(self.costs.client_s, self._request)
            elif self._num_nodes:
                key, base = share.key, outcome.base_length + len(outcome.token_ids)
                self._later(self.costs.draft_s, lambda _, key=key, base=base: self._draft(key, base))
        self.scheduler.pass_over(shares, num_rows, self.now_s)
        self._num_passes += 1
        self._pass_ended_s = self.now_s
        self.counts.passes += 1


_LOGITS = np.eye(1, VOCAB, dtype=np.float32).repeat(65, axis=0)
