"""Grammars by llguidance: what a text allows, token by token. Only this module knows the library.

Which tokens end an output is ours to say: it depends on the request (`ignore_eos`), and the library has to hear of no
other end than its own.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer

from coppice.core.errors import InvalidRequestError, UnsupportedError
from coppice.core.grammar import Grammar, GrammarKind

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

    from verifier_svc.verify.sampler import Mask

# The token that ends an output in the library's eyes. It is no row of any model, so nothing ever draws it.
_END = "<|end of what a grammar describes|>"
# A model that has nothing to say may fill the space between two symbols without end; indentation needs less than this.
_WHITE_SPACE = r"[\x20\x0A\x0D\x09]{1,32}"
# Counts of the library's own steps, so that they fall in the same place each time. Below its defaults: repetitions of
# repetitions that take tens of milliseconds for each token are refused, and a sequence takes at most about 25 MiB. An
# object of 500 optional properties needs 4,000 to 8,000 items in a step.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=100_000,
    step_max_items=8_000,
    max_lexer_states=20_000,
    verbose_errors=False,
)
# CPU time that an output may take for its masks: so much at once, and so much more for each token. Ordinary grammars
# take 0.01 to 0.2 ms a token, and up to 5 ms for one with a thousand keys to choose from. The library's counts do not
# bound a grammar that can be read in hundreds of ways at once.
STEP_CREDIT_S = 0.05
STEP_SHARE_S = 0.002
# Bytes of a compiled grammar where they were not measured: this and so many for each byte of its text. Small grammars
# have 30 to 550 KiB; the larger ones have 20 to 400 bytes for each byte of text.
_BASE_BYTES = 512 << 10
_BYTES_PER_TEXT_BYTE = 400
# What the library appends to messages when it leaves its own state out.
_NON_VERBOSE = "\n<non-verbose/>"
# What it says where no byte can follow a text that is no match.
_NO_MATCH = ("NoExtension", "NoExtensionBias")


class CompiledGrammar:
    """A grammar at its beginning; every output starts from a copy."""

    def __init__(self, grammar: Grammar, matcher: LLMatcher) -> None:
        self.grammar = grammar
        self._matcher = matcher
        # Memory that it takes: an estimate, until somebody measures it.
        self.num_bytes = _BASE_BYTES + _BYTES_PER_TEXT_BYTE * len(grammar.text.encode())
        # Whether an output was refused since its masks take too long: no other should be started.
        self.is_too_slow = False

    def matcher(self) -> LLMatcher:
        """A matcher of an output's own."""
        return self._matcher.deep_copy()


class GrammarVocabulary:
    """The target's tokens as bytes, which is how grammars see them. Building it holds the interpreter for long.

    Raises:
        UnsupportedError: the tokenizer's decoder does not say which bytes a token stands for.
    """

    def __init__(self, tokenizer_json: bytes, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        tokenizer: Tokenizer = Tokenizer.from_buffer(tokenizer_json)
        tokenizer.add_special_tokens([_END])
        end = tokenizer.token_to_id(_END)
        assert end is not None, "a token that was just added has an id"
        try:
            self._tokenizer = LLTokenizer(tokenizer.to_str(), eos_token=end)
        except ValueError as error:
            raise UnsupportedError(
                f"sampling.grammar: the target's tokenizer cannot follow grammars: {error}"
            ) from error
        self._vocab_size = vocab_size
        # Tokens that match no text, whatever a grammar says.
        self._no_text = [token for token in (end, *eos_token_ids) if token < vocab_size]

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Read a grammar and find its first tokens, which is most of the work.

        Raises:
            InvalidRequestError: it cannot be read, is too complex, or nothing matches it.
        """
        matcher = LLMatcher(self._tokenizer, _source(grammar), log_level=0, limits=_LIMITS)
        _check(matcher, grammar)
        matcher.compute_bitmask()
        _check(matcher, grammar)
        return CompiledGrammar(grammar, matcher)

    def begin(self, compiled: CompiledGrammar, output: Sequence[int], end_token_ids: Sequence[int]) -> GrammarState:
        """The state behind the tokens that an output has already; `end_token_ids` may end it.

        Raises:
            InvalidRequestError: the grammar does not allow these tokens, or an earlier output showed it to be too slow.
        """
        if compiled.is_too_slow:
            raise too_slow(compiled.grammar)
        matcher = compiled.matcher()
        matched = matcher.try_consume_tokens(list(output))
        if matched < len(output):
            raise InvalidRequestError("resume_token_ids", f"entry {matched} is a token that the grammar does not allow")
        return GrammarState(compiled, matcher, self._vocab_size, self._no_text, end_token_ids)


class GrammarState:
    """Where one output is in its grammar. Used by one thread at a time.

    Raises:
        InvalidRequestError: nothing can follow the output so far, and it is no match; or its masks take too long.
    """

    def __init__(
        self,
        compiled: CompiledGrammar,
        matcher: LLMatcher,
        vocab_size: int,
        no_text: Sequence[int],
        end_token_ids: Sequence[int],
    ) -> None:
        # Kept whole, so that whoever counts the memory of compiled grammars sees those in use.
        self._compiled = compiled
        self._grammar = compiled.grammar
        self._credit_s = STEP_CREDIT_S
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._no_text = list(no_text)
        self._end_token_ids = list(end_token_ids)
        self._find_allowed()

    @property
    def allowed(self) -> Mask:
        """The tokens that may come next [vocab]."""
        return self._allowed

    @property
    def is_complete(self) -> bool:
        """Whether the output matches and nothing may follow it."""
        return self._is_complete

    def push(self, token: int) -> None:
        """Take the next token, one of those that are allowed; after an end token none may follow.

        Raises:
            InvalidRequestError: what follows is too complex to be found out, or is nothing that the vocabulary has.
        """
        if token in self._end_token_ids:
            return
        # Of this thread alone: a busy machine makes no grammar slow.
        started_s = time.thread_time()
        self._matcher.consume_token(token)
        self._find_allowed()
        self._spend(time.thread_time() - started_s)

    def copy(self) -> GrammarState:
        """Another output's state at the same place, with what is left of the credit."""
        other = copy.copy(self)
        other._matcher = self._matcher.deep_copy()
        return other

    def _spend(self, cpu_s: float) -> None:
        """Take what a token cost from the credit of the output."""
        self._credit_s = min(self._credit_s + STEP_SHARE_S, STEP_CREDIT_S) - cpu_s
        if self._credit_s < 0:
            self._compiled.is_too_slow = True
            raise too_slow(self._grammar)

    def _find_allowed(self) -> None:
        _check(self._matcher, self._grammar)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        _check(self._matcher, self._grammar)
        # Rows that a model has beyond its tokenizer are zeros here: never allowed.
        allowed = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        allowed[self._no_text] = False
        is_match = self._matcher.is_accepting()
        self._is_complete = is_match and not allowed.any()
        if is_match:
            allowed[self._end_token_ids] = True
        elif not allowed.any():
            raise InvalidRequestError(self._grammar.field, "no token of the target can follow the output so far")
        self._allowed = allowed


def too_slow(grammar: Grammar) -> InvalidRequestError:
    """The refusal of a grammar whose masks take too long."""
    return InvalidRequestError(grammar.field, "is too complex: finding the tokens that may come next takes too long")


def _source(grammar: Grammar) -> str:
    """The grammar as the library takes it."""
    if grammar.kind is GrammarKind.REGEX:
        text = grammar.text
        if (len(text) - len(text.rstrip("\\"))) % 2:
            # The library would leave it out.
            raise InvalidRequestError(grammar.field, "ends in a lone backslash")
        return LLMatcher.grammar_from_regex(text)
    try:
        schema = json.loads(grammar.text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(grammar.field, f"is not JSON: {error}") from error
    if not isinstance(schema, dict):
        raise InvalidRequestError(grammar.field, "must be a JSON object")
    # A schema may carry options of the library, and then has them all its own way.
    defaults: JsonCompileOptions = {} if "x-guidance" in schema else {"whitespace_pattern": _WHITE_SPACE}
    try:
        return LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=defaults)
    except ValueError as error:
        raise InvalidRequestError(grammar.field, str(error)) from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON value")


def _check(matcher: LLMatcher, grammar: Grammar) -> None:
    """Raise InvalidRequestError when a matcher has failed, which it does for good."""
    if not matcher.is_error():
        return
    message = matcher.get_error().removesuffix(_NON_VERBOSE).strip()
    raise InvalidRequestError(grammar.field, "nothing matches it" if message in _NO_MATCH else message)
