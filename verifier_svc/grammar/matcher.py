"""Grammars by llguidance: allowed next tokens, token by token. The only module that uses the library.

End tokens are handled here: they depend on the request (`ignore_eos`), and the library must see no end but its own.
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


# End token of the library. No row of any model, so never drawn.
_END = "<|end of what a grammar describes|>"
# Bounds whitespace between two symbols, which a model could otherwise repeat for ever; indentation needs less.
_WHITE_SPACE = r"[\x20\x0A\x0D\x09]{1,32}"
# Limits in the library's own steps, so that they are deterministic. Below its defaults: nested repetitions that take
# tens of milliseconds per token are refused, and a sequence takes at most about 25 MiB. An object of 500 optional
# properties needs 4,000 to 8,000 items in a step.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=100_000,
    step_max_items=8_000,
    max_lexer_states=20_000,
    verbose_errors=False,
)
# CPU time for masks of an output: a burst, and a rate per token. Ordinary grammars take 0.01 to 0.2 ms per token, up
# to 5 ms with a thousand keys to choose from. The library's limits do not bound highly ambiguous grammars.
STEP_CREDIT_S = 0.05
STEP_SHARE_S = 0.002
# Estimated size of a compiled grammar: a constant and a size per byte of its text. Small grammars have 30 to 550 KiB;
# the larger ones 20 to 400 bytes per byte of text.
_BASE_BYTES = 512 << 10
_BYTES_PER_TEXT_BYTE = 400
# Suffix of the library's messages when it omits its own state.
_NON_VERBOSE = "\n<non-verbose/>"
# Its messages if no byte can follow an incomplete text.
_NO_MATCH = ("NoExtension", "NoExtensionBias")


class CompiledGrammar:
    """A grammar in its initial state; every output starts from a copy."""

    def __init__(self, grammar: Grammar, matcher: LLMatcher) -> None:
        self.grammar = grammar
        self._matcher = matcher
        # Memory; an estimate until measured.
        self.num_bytes = _BASE_BYTES + _BYTES_PER_TEXT_BYTE * len(grammar.text.encode())
        # Whether an output was refused because its masks take too long: then no other is started.
        self.is_too_slow = False

    def matcher(self) -> LLMatcher:
        """A matcher for one output."""
        return self._matcher.deep_copy()


class GrammarVocabulary:
    """The target's tokens as bytes. Construction holds the GIL for long.

    Raises:
        UnsupportedError: the tokenizer's decoder does not map tokens to bytes.
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
        # Never allowed, whatever the grammar.
        self._no_text = [token for token in (end, *eos_token_ids) if token < vocab_size]

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Parse a grammar and compute its first tokens, which is most of the work.

        Raises:
            InvalidRequestError: invalid, too complex, or matched by nothing.
        """
        matcher = LLMatcher(self._tokenizer, _source(grammar), log_level=0, limits=_LIMITS)
        _check(matcher, grammar)
        matcher.compute_bitmask()
        _check(matcher, grammar)
        return CompiledGrammar(grammar, matcher)

    def begin(self, compiled: CompiledGrammar, output: Sequence[int], end_token_ids: Sequence[int]) -> GrammarState:
        """The state after an output's tokens; `end_token_ids` may end it.

        Raises:
            InvalidRequestError: the grammar does not allow these tokens, or was too slow in an earlier output.
        """
        if compiled.is_too_slow:
            raise too_slow(compiled.grammar)
        matcher = compiled.matcher()
        matched = matcher.try_consume_tokens(list(output))
        if matched < len(output):
            raise InvalidRequestError("resume_token_ids", f"entry {matched} is a token that the grammar does not allow")
        return GrammarState(compiled, matcher, self._vocab_size, self._no_text, end_token_ids)


class GrammarState:
    """Position of one output in its grammar. Used by one thread at a time.

    Raises:
        InvalidRequestError: the output is incomplete and nothing can follow it; or its masks take too long.
    """

    def __init__(
        self,
        compiled: CompiledGrammar,
        matcher: LLMatcher,
        vocab_size: int,
        no_text: Sequence[int],
        end_token_ids: Sequence[int],
    ) -> None:
        # A reference, so that memory of grammars in use is counted.
        self._compiled = compiled
        self._grammar = compiled.grammar
        self._credit_s = STEP_CREDIT_S
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._no_text = list(no_text)
        self._end_token_ids = list(end_token_ids)
        self._find_allowed()

    def push(self, token: int) -> None:
        """Advance by an allowed token; none may follow an end token.

        Raises:
            InvalidRequestError: the following tokens are too complex to compute, or none is in the vocabulary.
        """
        if token in self._end_token_ids:
            return
        # Of this thread only, so that load on the machine does not count.
        started_s = time.thread_time()
        self._matcher.consume_token(token)
        self._find_allowed()
        self._spend(time.thread_time() - started_s)

    def copy(self) -> GrammarState:
        """State of another output at the same position, with the remaining credit."""
        other = copy.copy(self)
        other._matcher = self._matcher.deep_copy()
        return other

    def _spend(self, cpu_s: float) -> None:
        """Deduct a token's CPU time from the output's credit."""
        self._credit_s = min(self._credit_s + STEP_SHARE_S, STEP_CREDIT_S) - cpu_s
        if self._credit_s < 0:
            self._compiled.is_too_slow = True
            raise too_slow(self._grammar)

    def _find_allowed(self) -> None:
        _check(self._matcher, self._grammar)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        _check(self._matcher, self._grammar)
        # Rows of the model beyond its tokenizer are zeros: never allowed.
        allowed = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        allowed[self._no_text] = False
        is_match = self._matcher.is_accepting()
        # Whether the output matches and nothing may follow.
        self.is_complete = is_match and not allowed.any()
        if is_match:
            allowed[self._end_token_ids] = True
        elif not allowed.any():
            raise InvalidRequestError(self._grammar.field, "no token of the target can follow the output so far")
        # Next tokens [vocab].
        self.allowed = allowed


def too_slow(grammar: Grammar) -> InvalidRequestError:
    """Error for a grammar whose masks take too long."""
    return InvalidRequestError(grammar.field, "is too complex: finding the tokens that may come next takes too long")


def _source(grammar: Grammar) -> str:
    """The grammar in the library's format."""
    if grammar.kind is GrammarKind.REGEX:
        text = grammar.text
        if (len(text) - len(text.rstrip("\\"))) % 2:
            # The library would drop it.
            raise InvalidRequestError(grammar.field, "ends in a lone backslash")
        return LLMatcher.grammar_from_regex(text)
    try:
        schema = json.loads(grammar.text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(grammar.field, f"is not JSON: {error}") from error
    if not isinstance(schema, dict):
        raise InvalidRequestError(grammar.field, "must be a JSON object")
    # A schema's own library options replace ours.
    defaults: JsonCompileOptions = {} if "x-guidance" in schema else {"whitespace_pattern": _WHITE_SPACE}
    try:
        return LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=defaults)
    except ValueError as error:
        raise InvalidRequestError(grammar.field, str(error)) from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON value")


def _check(matcher: LLMatcher, grammar: Grammar) -> None:
    """Raise InvalidRequestError if a matcher has failed, which is permanent."""
    if not matcher.is_error():
        return
    message = matcher.get_error().removesuffix(_NON_VERBOSE).strip()
    raise InvalidRequestError(grammar.field, "nothing matches it" if message in _NO_MATCH else message)
