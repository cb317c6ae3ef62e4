"""Prompts: read from a file of JSON lines, or cut from files that no bundled model was trained on."""

from __future__ import annotations

import gzip
import json
import random
import re
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from pathlib import Path

from coppice.core.chat import ChatMessage, ChatTemplate
from coppice.core.tokenizer import TargetTokenizer, load_tokenizer_json
from coppice.lab.bench.harness.experiment import BenchmarkError
from coppice.training.corpus import SourceFile, read_corpus, standard_library

# Long enough to say what the file is about, short enough to leave the time to decoding. The shortest have two thirds of
# the most.
MAX_PROMPT_CHARS = 900
# What has to follow a cut for it to lie inside a file.
MIN_REST_CHARS = 200
# Cuts in one file are this far apart at first (no overlap); it is halved while too few are found.
MIN_SPACING_CHARS = 50


class PromptsError(ValueError):
    """A prompt file that cannot be used; the message names file and line."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt and where it comes from. A question to a chat model is rendered by the target's chat template."""

    text: str
    origin: str
    category: str = field(default="", kw_only=True)
    is_question: bool = field(default=False, kw_only=True)


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a JSON-lines file, gzipped or not: `prompt`, or as a question the first of Spec-Bench's `turns`.

    Raises PromptsError if the file cannot be read, a line is not of these shapes, or there is none.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            prompts = [_parse(line, path, number) for number, line in enumerate(lines, 1) if line.strip()]
    except (OSError, UnicodeDecodeError, EOFError, zlib.error) as error:
        raise PromptsError(f"{path}: {error}") from error
    if not prompts:
        raise PromptsError(f"{path}: holds no prompt")
    return prompts


def first_of_each_category(prompts: Sequence[Prompt], number: int) -> list[Prompt]:
    """The first `number` prompts of each category, in their order."""
    taken: Counter[str] = Counter()
    chosen = []
    for prompt in prompts:
        taken[prompt.category] += 1
        if taken[prompt.category] <= number:
            chosen.append(prompt)
    return chosen


def write_prompts(prompts: Sequence[Prompt], path: Path) -> None:
    """Write prompts as JSON lines that `read_prompts` reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"prompt": prompt.text, "origin": prompt.origin}, ensure_ascii=False) for prompt in prompts]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def held_out_prompts(
    num_prompts: int, seed: int, files: Sequence[SourceFile] | None = None, max_chars: int = MAX_PROMPT_CHARS
) -> list[Prompt]:
    """Prompts cut from held-out files, by default of the standard library: the same wherever Python is the same.

    They have between two thirds of `max_chars` characters and all of them, give or take a line. Raises PromptsError if
    the held-out files have no room for that many different cuts.
    """
    files = read_corpus([standard_library()]) if files is None else files
    held_out = [file for file in files if file.is_held_out]
    spacing = max_chars
    while spacing >= MIN_SPACING_CHARS:
        rng = random.Random(seed)
        cuts = [[(file, cut) for cut in _cuts(file.text, spacing, _fewest(max_chars), rng)] for file in held_out]
        # In turn from every file, so that a few prompts are not all from the largest one.
        chosen = [item for item in chain.from_iterable(zip_longest(*cuts)) if item is not None]
        if len(chosen) >= num_prompts:
            return [_cut_prompt(file, cut, max_chars, rng) for file, cut in chosen[:num_prompts]]
        spacing //= 2
    raise PromptsError(f"the held-out files have no room for {num_prompts} prompts")


def encoded_prompts(
    target: Path, prompts: Sequence[Prompt], max_tokens: int, max_context_tokens: int
) -> tuple[list[list[int]], int]:
    """The prompts in a target's tokens, too long ones without their beginning, and how many were cut.

    Raises BenchmarkError if the output alone fills the context, or a prompt has no token.
    """
    tokenizer = TargetTokenizer(load_tokenizer_json(target))
    encoded = [tokenizer.encode(text) for text in _rendered(target, prompts)]
    room = max_context_tokens - max_tokens
    if room < 1:
        raise BenchmarkError(f"outputs of {max_tokens} tokens leave no room for a prompt in {max_context_tokens}")
    if empty := [number for number, prompt in enumerate(encoded, 1) if not prompt]:
        raise BenchmarkError(f"prompt {empty[0]} has no token")
    return [list(prompt[-room:]) for prompt in encoded], sum(len(prompt) > room for prompt in encoded)


def chat_template(target: Path) -> ChatTemplate | None:
    """The chat template of a target; None where it has none."""
    from verifier_svc.model.checkpoint import read_tokenizer

    checkpoint = read_tokenizer(str(target))
    return ChatTemplate(checkpoint.chat_template, checkpoint.special_tokens) if checkpoint.chat_template else None


def _rendered(target: Path, prompts: Sequence[Prompt]) -> list[str]:
    """Texts of the prompts; questions as the target's chat template has them, where it has one."""
    template = chat_template(target) if any(prompt.is_question for prompt in prompts) else None
    return [
        template.render([ChatMessage("user", prompt.text)]) if template and prompt.is_question else prompt.text
        for prompt in prompts
    ]


def _parse(line: str, path: Path, number: int) -> Prompt:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise PromptsError(f"{path}:{number}: not JSON: {error.msg}") from error
    text, is_question = _text_of(record)
    if not isinstance(text, str) or not text:
        raise PromptsError(f"{path}:{number}: needs a non-empty `prompt` string or `turns` list of strings")
    origin, category = record.get("origin"), record.get("category")
    return Prompt(
        text,
        origin if isinstance(origin, str) else f"{path.name}:{number}",
        category=category if isinstance(category, str) else "",
        is_question=is_question,
    )


def _text_of(record: object) -> tuple[object, bool]:
    """A record's prompt, and whether it is a question."""
    if not isinstance(record, dict):
        return None, False
    if "prompt" in record:
        return record["prompt"], False
    turns = record.get("turns")
    return (turns[0] if isinstance(turns, list) and turns else None), True


def _fewest(max_chars: int) -> int:
    return max_chars * 2 // 3


def _cuts(text: str, spacing: int, min_chars: int, rng: random.Random) -> list[int]:
    """Line starts inside the text in random order, any two at least `spacing` apart."""
    last = len(text) - MIN_REST_CHARS
    candidates = [found.end() for found in re.finditer("\n", text) if min_chars <= found.end() <= last]
    rng.shuffle(candidates)
    cuts: list[int] = []
    for candidate in candidates:
        if all(abs(candidate - cut) >= spacing for cut in cuts):
            cuts.append(candidate)
    return cuts


def _cut_prompt(file: SourceFile, cut: int, max_chars: int, rng: random.Random) -> Prompt:
    """What precedes a cut, from a line start on.

    The line break at the cut is left to the model: tokenizers of code join it with the indentation after it.
    """
    earliest = max(0, cut - rng.randint(_fewest(max_chars), max_chars))
    start = 0 if earliest == 0 else file.text.find("\n", earliest, cut) + 1 or earliest
    line = file.text.count("\n", 0, cut) + 1
    return Prompt(file.text[start:cut].rstrip(), f"{file.name}:{line}")
