"""Tokens of 50 requests that together use every sampling parameter, and the recipe of `golden_tokens.json`.

The target is a pure function of the last three tokens, so its logits are the same on every machine. Write the file with
`python -m tests.unit.verifier_svc.golden_tokens`, and only where tokens of a seed are meant to change.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models

from coppice.core.grammar import Grammar, GrammarKind
from coppice.core.sampling import SamplingParams, StoppingOptions
from coppice.core.tree import EMPTY_TREE, TokenTree
from tests.toy_target import EOS as BYTE_EOS
from tests.toy_target import TOKENIZER_JSON
from tests.toy_target import VOCAB as BYTE_VOCAB
from tests.unit.verifier_svc.engine_harness import Harness, Result
from tests.unit.verifier_svc.oracles import tree_around
from tests.unit.verifier_svc.toy_pass import Language, ToyTarget, toy_info
from verifier_svc.engine.engine import Engine
from verifier_svc.engine.scheduler import SchedulerLimits

GOLDEN = Path(__file__).with_suffix(".json")
NUM_REQUESTS = 50
MAX_TOKENS = 24
LARGE_VOCAB, LARGE_EOS = 5003, 2
CONTEXT = 200
PATTERNS = ("[a-f]{2,9}( [a-f]{2,9})*", r"\d{1,3}(,\d{1,3})*")


@dataclass(frozen=True, slots=True)
class GoldenRequest:
    """A request to the target of this vocabulary."""

    vocab_size: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    stopping: StoppingOptions
    top_log_probs: int | None
    num_resumed: int


def golden_requests() -> list[GoldenRequest]:
    """The requests, in order; each parameter is at its default in about half of them."""
    return [_request(random.Random(number), number) for number in range(NUM_REQUESTS)]


def language(vocab_size: int) -> Language:
    """Logits [vocab] behind a context: likely tokens stand out as in a real model's, and some are equal."""

    def logits(context: tuple[int, ...]) -> np.ndarray:
        generator = np.random.default_rng([vocab_size, *context[-3:]])
        row = (generator.standard_normal(vocab_size) * 2.5).astype(np.float32)
        row[generator.integers(0, vocab_size, 4)] += np.float32(9)
        return np.where(generator.random(vocab_size) < 0.5, np.round(row * 4) / 4, row).astype(np.float32)

    return logits


def golden_engine(vocab_size: int) -> Engine:
    """An engine over that target, not started."""
    is_bytes = vocab_size == BYTE_VOCAB
    tokenizer = TOKENIZER_JSON if is_bytes else _character_tokenizer(vocab_size)
    info = toy_info(vocab_size, tokenizer, (BYTE_EOS if is_bytes else LARGE_EOS,), CONTEXT)
    limits = SchedulerLimits(max_sequences=8, max_queued=16, prefill_chunk=64)
    target: Any = ToyTarget(language(vocab_size), 200)
    return Engine(target, info, limits, max_nodes=16)


def ask(harness: Harness, request: GoldenRequest, known: list[int] | None = None) -> Result:
    """The answer to a request; with its `known` tokens, it is drafted by trees that hold some of these."""
    (result,) = harness.generate(
        [request.prompt],
        request.sampling,
        request.stopping,
        None if known is None else _drafter(known, request.vocab_size),
        num_resumed=request.num_resumed,
        top_log_probs=request.top_log_probs,
    )
    return result


def _request(chance: random.Random, number: int) -> GoldenRequest:
    vocab_size = BYTE_VOCAB if number % 2 else LARGE_VOCAB

    def some(value: Callable[[], Any], default: Any) -> Any:
        return value() if chance.random() < 0.5 else default

    def tokens(most: int) -> tuple[int, ...]:
        return tuple(chance.sample(range(vocab_size), chance.randint(1, most)))

    has_grammar = vocab_size == BYTE_VOCAB and number % 5 == 0
    sampling = SamplingParams(
        temperature=0.0 if number % 7 == 0 else some(lambda: round(chance.uniform(0.2, 2.0), 3), 1.0),
        top_k=some(lambda: chance.randint(1, 60), 0),
        top_p=some(lambda: round(chance.uniform(0.05, 0.99), 3), 1.0),
        min_p=some(lambda: round(chance.uniform(0.001, 0.3), 4), 0.0),
        repetition_penalty=some(lambda: round(chance.uniform(0.8, 1.6), 3), 1.0),
        presence_penalty=some(lambda: round(chance.uniform(-0.5, 1.5), 3), 0.0),
        frequency_penalty=some(lambda: round(chance.uniform(-0.5, 1.5), 3), 0.0),
        logit_bias=some(lambda: {token: round(chance.uniform(-5, 5), 2) for token in tokens(9)}, {}),
        allowed_token_ids=() if has_grammar else some(lambda: tokens(200), ()),
        bad_token_ids=some(lambda: tokens(40), ()),
        seed=chance.getrandbits(64),
        grammar=Grammar(GrammarKind.REGEX, chance.choice(PATTERNS)) if has_grammar else None,
    )
    num_resumed = 0 if has_grammar else some(lambda: chance.randint(1, 4), 0)
    stopping = StoppingOptions(
        max_tokens=MAX_TOKENS + num_resumed,
        min_tokens=some(lambda: chance.randint(1, 12), 0),
        stop_token_ids=some(lambda: tokens(20), ()),
        ignore_eos=chance.random() < 0.3,
    )
    prompt = tuple(chance.randrange(vocab_size) for _ in range(chance.randint(5, 40)))
    return GoldenRequest(vocab_size, prompt, sampling, stopping, some(lambda: 2, None), num_resumed)


def _drafter(known: list[int], vocab_size: int) -> Callable[..., TokenTree]:
    generator = np.random.default_rng(len(known))

    def draft(_index: int, generated: list[int], _base: int) -> TokenTree:
        path = known[len(generated) :][: int(generator.integers(0, 7))]
        return tree_around(generator, path, vocab_size, num_decoys=2) if path else EMPTY_TREE

    return draft


def _character_tokenizer(vocab_size: int) -> bytes:
    tokenizer = Tokenizer(models.WordLevel({chr(32 + index): index for index in range(vocab_size)}, unk_token=chr(32)))
    tokenizer.decoder = decoders.Fuse()
    encoded: bytes = tokenizer.to_str().encode()
    return encoded


def main() -> None:
    """Write the file."""
    answers: dict[int, Result] = {}
    for vocab_size in (BYTE_VOCAB, LARGE_VOCAB):
        engine = golden_engine(vocab_size)
        engine.start()
        harness = Harness(engine)
        for number, request in enumerate(golden_requests()):
            if request.vocab_size == vocab_size:
                answers[number] = ask(harness, request)
        engine.stop()
    lines = []
    for number in range(NUM_REQUESTS):
        answer = answers[number]
        error = None if answer.error is None else answer.error.message
        finish = None if answer.finish is None else answer.finish.reason.value
        lines.append(json.dumps({"token_ids": answer.token_ids, "finish": finish, "error": error}))
    GOLDEN.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
