"""Conversations of a load: a turn's prompt has all turns before in it, with the answers that plain decoding gives."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

from coppice.core.chat import ChatMessage
from coppice.core.tokenizer import TargetTokenizer, load_tokenizer_json
from coppice.lab.bench.client import Task
from coppice.lab.bench.harness.experiment import BenchmarkError
from coppice.lab.bench.load.loads import Workload
from coppice.lab.bench.prompts import chat_template

# Makes the longest output of a task, without speculation.
Ask = Callable[[Task], Awaitable[tuple[int, ...]]]
Outputs = tuple[tuple[int, ...], ...]


class Chats:
    """Conversations of `num_turns` turns out of texts: the first begins all of them, the others are what users say."""

    def __init__(self, target: Path, texts: Sequence[str], num_turns: int, max_context_tokens: int) -> None:
        """Raises BenchmarkError unless there are texts for a conversation."""
        first, *said = texts
        num_conversations = len(said) // num_turns
        if not num_conversations:
            raise BenchmarkError(f"a conversation of {num_turns} turns needs {num_turns + 1} prompts, got {len(texts)}")
        self._users = [said[place * num_turns : (place + 1) * num_turns] for place in range(num_conversations)]
        for users in self._users:
            users[0] = f"{first}\n\n{users[0]}"
        self._template = chat_template(target)
        self._tokenizer = TargetTokenizer(load_tokenizer_json(target))
        self._max_context_tokens = max_context_tokens

    async def workload(self, empty: Workload, ask: Ask) -> tuple[Workload, Outputs]:
        """`empty` with the prompts of all turns, and the longest output of each.

        Raises BenchmarkError if a conversation does not fit the context.
        """
        numbers = range(len(self._users))
        conversations = await asyncio.gather(*(self._conversation(empty, ask, number) for number in numbers))
        turns = [turn for conversation in conversations for turn in conversation]
        return replace(empty, prompts=tuple(prompt for prompt, _ in turns)), tuple(output for _, output in turns)

    async def _conversation(
        self, empty: Workload, ask: Ask, number: int
    ) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Prompt and longest output of each turn."""
        turns: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        messages: list[ChatMessage] = []
        for text in self._users[number]:
            messages.append(ChatMessage("user", text))
            prompt, place = (
                tuple(self._tokenizer.encode(self._rendered(messages))),
                number * empty.num_turns + len(turns),
            )
            if len(prompt) + empty.max_tokens > self._max_context_tokens:
                raise BenchmarkError(
                    f"turn {len(turns) + 1} has {len(prompt)} tokens, and with an output of {empty.max_tokens} it "
                    f"exceeds the context of {self._max_context_tokens}: take fewer --turns or shorter outputs"
                )
            output = await ask(Task(prompt, empty.max_tokens, empty.temperature, empty.seed + place, prompt=place))
            messages.append(ChatMessage("assistant", self._tokenizer.decode(output[: empty.length(place)])))
            turns.append((prompt, output))
        return turns

    def _rendered(self, messages: Sequence[ChatMessage]) -> str:
        if self._template is None:
            return "\n".join(message.content for message in messages)
        return self._template.render(messages)
