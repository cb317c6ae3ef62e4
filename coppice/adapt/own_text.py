"""Text that a target writes itself: turns of a user, and its answers to them, or to given prompts.

A drafter is trained on what the target says, so nothing but the target is needed: it continues its own chat template up
to the user's turn (a few words of which are given in half of the cases, for variety), and then answers. Base models
without a template write continuations of nothing. Every text is a function of the seed and its number.
"""

from __future__ import annotations

import queue
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from coppice.core.chat import ChatMessage, ChatTemplate
from coppice.core.sampling import SamplingParams, StoppingOptions
from coppice.core.tokenizer import TargetTokenizer
from verifier_svc.engine.engine import Engine
from verifier_svc.engine.sequence import SequenceKey, SequenceSpec
from verifier_svc.model.target_model import TargetInfo
from verifier_svc.stream.events import ErrorEvent, Event, OutcomeEvent, PromptEvent

# Beginnings of users' turns, by what people ask of such models.
BEGINNINGS = (
    "Write a Python function",
    "Write a function in JavaScript that",
    "Complete the following code:\n\ndef",
    "Fix the bug in this code:\n\n",
    "Explain what this code does:\n\n",
    "Write a SQL query",
    "Write a C++ program",
    "Translate German to English:",
    "Translate the following sentence into English:",
    "Translate English to French:",
    "Summarize the following article:\n\n",
    "Summarize:",
    "Give a short summary of this text:\n\n",
    "Answer the question using the passage below.\n\nPassage:",
    "Read the text and answer the question.\n\nText:",
    "Here are some search results:\n\n[1]",
    "Question:",
    "Who was",
    "When did",
    "Where is",
    "What is",
    "Why do",
    "How many",
    "How do I",
    "If a train",
    "A farmer has",
    "Solve the equation",
    "Compute",
    "There are",
    "Natalia",
    "Write a short story about",
    "Write a poem",
    "Write an email to",
    "Compose a blog post about",
    "Imagine you are",
    "Pretend that you are",
    "Extract the names from the following text:",
    "Classify the sentiment of this review:",
    "List five",
    "Compare",
    "Which word does not belong",
    "Explain to a child",
    "Rewrite the following sentence",
    "Describe the difference between",
)
# Temperatures of answers, with their shares; greedy first.
ANSWER_TEMPERATURES = ((0.0, 0.5), (0.7, 0.25), (1.0, 0.25))
_TURN = SamplingParams(temperature=1.0, top_p=0.9)
_MARK = "\ufffc"
# Shorter turns and answers teach nothing.
_LEAST_TURN_TOKENS = 4
_LEAST_ANSWER_TOKENS = 8
# A run may be paused for a while.
_SILENCE_S = 3600.0


@dataclass(frozen=True, slots=True)
class TextShape:
    """Most tokens of a turn and of an answer, and number of sequences at once."""

    turn_tokens: int = 224
    answer_tokens: int = 320
    at_once: int = 64


@dataclass(frozen=True, slots=True)
class GivenPrompt:
    """A prompt of the user's: as it is, or a turn of a conversation if the target has a chat template."""

    text: str
    is_turn: bool


@dataclass(frozen=True, slots=True)
class WrittenText:
    """A prompt, the target's answer, the temperature of the latter, and the text's number.

    `features` are those of the answer's tokens as in outcomes, and `prompt_features` those of the prompt's after its
    first, empty unless requested. A text too short to be of use has no answer.
    """

    number: int
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    temperature: float
    features: bytes = b""
    prompt_features: bytes = b""


class TurnFrame:
    """Tokens of a chat template before a user's turn and after it; base models only have a first token."""

    def __init__(self, info: TargetInfo, tokenizer: TargetTokenizer) -> None:
        self._tokenizer = tokenizer
        self.begin: tuple[int, ...] = ()
        self.end: tuple[int, ...] = ()
        if info.chat_template:
            rendered = ChatTemplate(info.chat_template, info.special_tokens).render([ChatMessage("user", _MARK)])
            before, _, after = rendered.partition(_MARK)
            self.begin, self.end = self.encode(before), self.encode(after)
        elif info.eos_token_ids:
            self.begin = info.eos_token_ids[:1]
        if not self.begin:
            self.begin = (0,)

    @property
    def is_chat(self) -> bool:
        """Whether the model has turns."""
        return bool(self.end)

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a text."""
        return tuple(self._tokenizer.encode(text, adds_special=False))


@dataclass(slots=True)
class _Writing:
    number: int
    key: SequenceKey
    temperature: float
    # None while the turn is written.
    prompt: tuple[int, ...] | None
    start: tuple[int, ...]
    tokens: list[int]
    features: list[bytes]
    prompt_features: list[bytes]


class OwnWriter:
    """Lets a running engine write texts, many at once. Used by one thread."""

    STREAM = 1

    def __init__(
        self,
        engine: Engine,
        info: TargetInfo,
        seed: int,
        shape: TextShape | None = None,
        prompts: Sequence[GivenPrompt] = (),
        *,
        wants_features: bool = False,
    ) -> None:
        """With `prompts` no turns are written; each is answered again and again, by other seeds."""
        self._engine = engine
        self._prompts = prompts
        # Of a prompt, so that an answer has room; the part before is left out.
        self._most_prompt_tokens = max(1, info.max_context_tokens - (shape or TextShape()).answer_tokens)
        self._seed = seed
        self._wants_features = wants_features
        self._shape = shape or TextShape()
        self._stops = info.eos_token_ids
        self._frame = TurnFrame(info, TargetTokenizer(info.tokenizer_json))
        self._events: queue.SimpleQueue[Sequence[Event]] = queue.SimpleQueue()
        self._next_key = 0

    def write(self, numbers: Iterator[int]) -> Iterator[WrittenText]:
        """Texts of these numbers, in the order in which they are finished."""
        running: dict[int, _Writing] = {}
        self._engine.attach(self.STREAM, self._events.put)
        try:
            while True:
                while len(running) < self._shape.at_once and (number := next(numbers, None)) is not None:
                    self._add(running, self._begun(number))
                if not running:
                    return
                for event in self._events.get(timeout=_SILENCE_S):
                    yield from self._taken(event, running)
        finally:
            self._engine.detach(self.STREAM)

    def _begun(self, number: int) -> _Writing:
        chance = random.Random(f"{self._seed}:{number}")
        temperatures, shares = zip(*ANSWER_TEMPERATURES, strict=True)
        temperature = chance.choices(temperatures, shares)[0]
        if self._prompts:
            if number >= len(self._prompts):
                # The greedy answer is there already.
                temperature = chance.choices(temperatures[1:], shares[1:])[0]
            return _Writing(number, SequenceKey(self.STREAM, 0), temperature, self._given(number), (), [], [], [])
        start: tuple[int, ...] = ()
        if self._frame.is_chat and chance.random() < 0.5:
            start = self._frame.encode(chance.choice(BEGINNINGS))
        prompt = None if self._frame.is_chat else self._frame.begin
        return _Writing(number, SequenceKey(self.STREAM, 0), temperature, prompt, start, [], [], [])

    def _given(self, number: int) -> tuple[int, ...]:
        """The prompt that this text answers."""
        prompt = self._prompts[number % len(self._prompts)]
        tokens = self._frame.encode(prompt.text)
        if prompt.is_turn and self._frame.is_chat:
            room = self._most_prompt_tokens - len(self._frame.begin) - len(self._frame.end)
            return (*self._frame.begin, *tokens[-max(1, room) :], *self._frame.end)
        return tokens[-self._most_prompt_tokens :] or self._frame.begin

    def _add(self, running: dict[int, _Writing], writing: _Writing) -> None:
        """Open the next sequence of a text: its turn, or its answer."""
        self._next_key += 1
        writing.key = SequenceKey(self.STREAM, self._next_key)
        running[self._next_key] = writing
        seed = random.Random(f"{self._seed}:{writing.number}:{writing.prompt is None}").getrandbits(64)
        if writing.prompt is None:
            prompt, most = self._frame.begin + writing.start, self._shape.turn_tokens
            sampling = SamplingParams(temperature=_TURN.temperature, top_p=_TURN.top_p, seed=seed)
        else:
            prompt, most = writing.prompt, self._shape.answer_tokens
            # The law of base models without a beginning is their whole distribution.
            sampling = SamplingParams(temperature=writing.temperature if self._frame.is_chat else 1.0, seed=seed)
        wants_features = self._wants_features and writing.prompt is not None
        spec = SequenceSpec(
            prompt,
            sampling,
            StoppingOptions(max_tokens=most),
            # Of its own: what is found in the prefix cache has no features.
            cache_salt=str(self._next_key),
            wants_features=wants_features,
            max_prompt_features=len(prompt) if wants_features else 0,
        )
        self._engine.open(writing.key, spec)

    def _taken(self, event: Event, running: dict[int, _Writing]) -> Iterator[WrittenText]:
        if isinstance(event, ErrorEvent):
            raise event.error
        if isinstance(event, PromptEvent):
            running[event.sequence_id].prompt_features.append(event.states.states.tobytes())
        if not isinstance(event, OutcomeEvent):
            return
        writing = running[event.sequence_id]
        writing.tokens += event.outcome.token_ids
        writing.features.append(event.outcome.features)
        if event.outcome.finish is None:
            return
        del running[event.sequence_id]
        if writing.prompt is None and self._turn_ended(writing):
            self._add(running, writing)
        elif writing.prompt is None or len(writing.tokens) < _LEAST_ANSWER_TOKENS:
            yield WrittenText(writing.number, writing.prompt or (), (), writing.temperature)
        else:
            answer, parts = tuple(writing.tokens), (writing.features, writing.prompt_features)
            yield WrittenText(writing.number, writing.prompt, answer, writing.temperature, *map(b"".join, parts))

    def _turn_ended(self, writing: _Writing) -> bool:
        """Turn what was written into the answer's prompt; False if it is too short."""
        turn = [*writing.start, *writing.tokens]
        if turn[-1] in self._stops:
            turn.pop()
        if len(turn) < _LEAST_TURN_TOKENS:
            return False
        writing.prompt = (*self._frame.begin, *turn, *self._frame.end)
        writing.tokens, writing.features = [], []
        return True
