"""Grammars by llguidance: what a text allows, token by token. Only this module knows the library.

Which tokens end an output is ours to say: it depends on the request (`ignore_eos`), and the library has to hear of no
other end than its own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer

from coppice.errors import InvalidRequestError, UnsupportedError
from coppice.grammar import Grammar, GrammarKind
from verifier_svc.token_choice import Mask

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# The token that ends an output in the library's eyes. It is no row of any model, so nothing ever draws it.
_END = "<|end of what a grammar describes|>"
# A model that has nothing to say may fill the space between two symbols without end; indentation needs less than this.
_WHITE_SPACE = r"[\x20\x0A\x0D\x09]{1,32}"
# Counts of the library's own steps, so that they fall in the same place each time. Below its defaults: repetitions of
# repetitions that take tens of milliseconds for each token are refused, and a sequence takes at most about 40 MB.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000, step_lexer_fuel=100_000, max_lexer_states=20_000, verbose_errors=False
)
# What the library appends to messages when it leaves its own state out.
_NON_VERBOSE = "\n<non-verbose/>"
# What it says where no byte can follow a text that is no match.
_NO_MATCH = ("NoExtension", "NoExtensionBias")


class CompiledGrammar:
    """A grammar at its beginning; every output starts from a copy."""

    def __init__(self, grammar: Grammar, matcher: LLMatcher) -> None:
        self.grammar = grammar
        self._matcher = matcher

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
            InvalidRequestError: the grammar does not allow these tokens.
        """
        matcher = compiled.matcher()
        matched = matcher.try_consume_tokens(list(output))
        if matched < len(output):
            raise InvalidRequestError("resume_token_ids", f"entry {matched} is a token that the grammar does not allow")
        return GrammarState(compiled.grammar, matcher, self._vocab_size, self._no_text, end_token_ids)


class GrammarState:
    """Where one output is in its grammar. Used by one thread at a time.

    Raises:
        InvalidRequestError: nothing can follow the output so far, and it is no match.
    """

    def __init__(
        self,
        grammar: Grammar,
        matcher: LLMatcher,
        vocab_size: int,
        no_text: Sequence[int],
        end_token_ids: Sequence[int],
    ) -> None:
        self._grammar = grammar
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
        self._matcher.consume_token(token)
        self._find_allowed()

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
