"""The verifier's door and engine on a toy target, and trees as drafters draw them, for traversal verification."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from coppice.core.chance import Chance, Purpose, UniformChance, uniforms
from coppice.core.draft_distribution import DraftDistribution, truncated
from coppice.core.sampling import SamplingParams, StoppingOptions
from coppice.core.tree import TokenTree
from coppice.v1 import sampling_pb2, verifier_pb2
from coppice.wire.convert import sampling_to_proto, stopping_to_proto, tree_to_proto
from drafter_svc.drafters.small_lm.sampled_lm import Path, sample_tree
from tests.unit.verifier_svc.byte_tokenizer import byte_level_tokenizer
from tests.unit.verifier_svc.toy_pass import Language, ToyTarget, toy_info
from verifier_svc.engine.engine import Engine
from verifier_svc.engine.round_outcome import RoundOutcome
from verifier_svc.engine.scheduler import SchedulerLimits
from verifier_svc.engine.sequence import SequenceKey
from verifier_svc.stream.events import Event, OutcomeEvent
from verifier_svc.stream.request_parser import RequestParser as PeerDoor
from verifier_svc.verify.sampler import Logits

VOCAB = 3
EOS = 2
PROMPT = (0, 1)
MAX_NODES = 6
TRAVERSAL = sampling_pb2.ACCEPTANCE_RULE_TRAVERSAL
ENDLESS = StoppingOptions(max_tokens=8, ignore_eos=False)


@functools.cache
def raw_logits(context: tuple[int, ...]) -> Logits:
    """The target's logits."""
    return np.random.default_rng([17, len(context), *context]).normal(0, 1.5, VOCAB).astype(np.float32)


def draft_logits(context: tuple[int, ...]) -> Logits:
    """The drafter's: like the target's, and wrong by about as much."""
    noise = np.random.default_rng([18, len(context), *context]).normal(0, 1.0, VOCAB)
    return raw_logits(context) + noise.astype(np.float32)


class Door:
    """The verifier's door and engine without a network: messages in, events out, one pass at a time."""

    def __init__(self, language: Language = raw_logits, context: int = 12, num_blocks: int = 2) -> None:
        info = toy_info(VOCAB, byte_level_tokenizer([b"a", b"b", b"c"]), (EOS,), context)
        target: Any = ToyTarget(language, num_blocks)
        self.engine = Engine(target, info, SchedulerLimits(4, 4, prefill_chunk=16), MAX_NODES)
        self._events: list[Event] = []
        self._refused: list[Event] = []
        self._door = PeerDoor(self.engine, info, 0, self._refused.extend)
        self.engine.attach(0, self._events.extend)
        self._number = 0

    def open(
        self, sampling: SamplingParams, stopping: StoppingOptions, num_resumed: int = 0, **fields: object
    ) -> SequenceKey:
        self._number += 1
        key = SequenceKey(0, self._number)
        message = verifier_pb2.OpenSequence(
            prompt_token_ids=PROMPT,
            sampling=sampling_to_proto(sampling),
            stopping=stopping_to_proto(stopping),
            acceptance=TRAVERSAL,
            resumed_tokens=num_resumed,
            **fields,
        )
        self._door.take(verifier_pb2.VerifyRequest(sequence_id=key.sequence_id, open=message))
        return key

    def draft(self, key: SequenceKey, base_length: int, tree: TokenTree, budget: int = 0) -> None:
        message = verifier_pb2.Draft(base_length=base_length, tree=tree_to_proto(tree), budget=budget)
        self._door.take(verifier_pb2.VerifyRequest(sequence_id=key.sequence_id, draft=message))

    def step(self) -> list[Event]:
        """What one turn of the engine says, and what the door has refused."""
        # A turn waits for a command when nothing runs.
        self.engine._commands.put(lambda: None)
        self.engine.step()
        # What the next pass would deliver on its way.
        self.engine._deliver()
        said = [*self._events, *self._refused]
        self._events.clear()
        self._refused.clear()
        return said

    def round(self, key: SequenceKey) -> RoundOutcome:
        """The outcome of the sequence's next round."""
        [outcome] = [event.outcome for event in self.step() if isinstance(event, OutcomeEvent)]
        return outcome

    def close(self, key: SequenceKey) -> None:
        self.engine.close(key)


def draw(params: SamplingParams, widths: Sequence[int], max_tokens: int, chance: Chance) -> TokenTree:
    """A tree as drafters draw it."""

    def predict(paths: Sequence[Path]) -> list[DraftDistribution]:
        return [truncated(draft_logits((*PROMPT, *path)), params.temperature, max_tokens, 2) for path in paths]

    return sample_tree(widths, predict, chance).token_tree("toy")


def some_tree(params: SamplingParams, position: int = 0, widths: tuple[int, ...] = (2, 1)) -> TokenTree:
    return draw(params, widths, VOCAB, UniformChance(uniforms(params.seed, position, Purpose.DRAFT)))
