"""Drives a real engine from a test, playing orchestrator and drafter."""

from __future__ import annotations

import queue
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from coppice.core.log_probs import TokenLogProbs
from coppice.core.sampling import SamplingParams, StoppingOptions
from coppice.core.tree import TokenTree
from verifier_svc.engine.engine import Engine
from verifier_svc.engine.scheduler import SequenceKey
from verifier_svc.engine.sequence import Draft, SequenceSpec
from verifier_svc.stream.events import CompleteEvent, ErrorEvent, Event, LoadEvent, OutcomeEvent, PromptEvent
from verifier_svc.verify.output_end import SequenceFinish

DEADLINE_S = 60.0
# (request index, tokens generated so far, committed length) to the next draft, or None to send nothing.
Drafter = Callable[[int, Sequence[int], int], TokenTree | None]


@dataclass
class Result:
    """What one sequence produced."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[TokenLogProbs] = field(default_factory=list)
    finish: SequenceFinish | None = None
    rounds: int = 0
    accepted: int = 0
    stale: int = 0
    num_cached: int = 0
    error: ErrorEvent | None = None
    # One per token, for sequences that want them.
    features: bytes = b""
    # Those of the prompt by token, and the rounds before each event of them.
    prompt_features: dict[int, bytes] = field(default_factory=dict)
    rounds_before: list[int] = field(default_factory=list)


class Harness:
    """One stream of an engine."""

    def __init__(self, engine: Engine, stream: int = 0) -> None:
        self._engine = engine
        self._stream = stream
        self._events: queue.Queue[Event] = queue.Queue()
        self._partial: dict[int, list[int]] = {}
        engine.attach(stream, lambda events: [self._events.put(event) for event in events])

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | None = None,
        stopping: StoppingOptions | None = None,
        drafter: Drafter | None = None,
        linger_s: float = 5.0,
        num_resumed: int = 0,
        salt: str = "",
        top_log_probs: int | None = None,
        synchronous: bool = False,
        redraft_nodes: int = 0,
        lookup_nodes: int = 0,
        wants_features: Collection[int] = (),
        max_prompt_features: int = 0,
    ) -> list[Result]:
        """Open every prompt at once and serve drafts until all are finished. `wants_features`: numbers of prompts."""
        results = [Result() for _ in prompts]
        for index, prompt in enumerate(prompts):
            spec = SequenceSpec(
                tuple(prompt),
                sampling or SamplingParams(),
                stopping or StoppingOptions(max_tokens=24),
                num_resumed=num_resumed,
                linger_s=linger_s if drafter else 0.0,
                cache_salt=salt,
                top_log_probs=top_log_probs,
                synchronous=synchronous,
                max_redraft_nodes=redraft_nodes,
                max_lookup_nodes=lookup_nodes,
                wants_features=index in wants_features,
                max_prompt_features=max_prompt_features * (index in wants_features),
            )
            self._engine.open(SequenceKey(self._stream, index), spec)
        open_sequences = set(range(len(prompts)))
        while open_sequences:
            event = self._events.get(timeout=DEADLINE_S)
            if isinstance(event, LoadEvent):
                continue
            result = results[event.sequence_id]
            if isinstance(event, ErrorEvent):
                result.error = event
                open_sequences.discard(event.sequence_id)
            elif isinstance(event, CompleteEvent):
                result.finish = event.finish
                open_sequences.discard(event.sequence_id)
            elif isinstance(event, PromptEvent):
                self._take_prompt(event, result)
            elif isinstance(event, OutcomeEvent):
                self._take(event, result)
                if event.outcome.finish is not None:
                    open_sequences.discard(event.sequence_id)
                elif drafter is not None:
                    self._draft(event, result, drafter)
        return results

    def next_event(self) -> Event:
        """The next event of the stream."""
        return self._events.get(timeout=DEADLINE_S)

    def collect(self, finished: dict[int, list[int]]) -> None:
        """Take the next event; outputs that end with it are put into `finished`."""
        event = self.next_event()
        if isinstance(event, OutcomeEvent):
            self._partial.setdefault(event.sequence_id, []).extend(event.outcome.token_ids)
            if event.outcome.finish is not None:
                finished[event.sequence_id] = self._partial.pop(event.sequence_id)

    def _take(self, event: OutcomeEvent, result: Result) -> None:
        outcome = event.outcome
        result.token_ids += outcome.token_ids
        result.log_probs += outcome.log_probs
        result.finish = outcome.finish
        result.rounds += 1
        result.num_cached = event.cached_tokens
        result.accepted += len(outcome.accepted_nodes)
        result.stale += outcome.stale_drafts
        result.features += outcome.features

    def _take_prompt(self, event: PromptEvent, result: Result) -> None:
        result.rounds_before.append(result.rounds)
        for number, row in enumerate(event.states.states, event.states.first_token):
            assert number not in result.prompt_features
            result.prompt_features[number] = row.tobytes()

    def _draft(self, event: OutcomeEvent, result: Result, drafter: Drafter) -> None:
        base = event.outcome.base_length + len(event.outcome.token_ids)
        tree = drafter(event.sequence_id, result.token_ids, base)
        if tree is not None:
            self._engine.submit(SequenceKey(self._stream, event.sequence_id), Draft(base, tree))
