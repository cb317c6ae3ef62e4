"""Compiling grammars on a thread of their own, so that neither the event loop nor a pass waits for one."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from coppice.errors import CoppiceError, UnsupportedError
from coppice.grammar import Grammar

if TYPE_CHECKING:
    from verifier_svc.grammar import CompiledGrammar, GrammarState, GrammarVocabulary

logger = logging.getLogger(__name__)

# A service has few grammars and many requests for each; one takes kilobytes, rarely a megabyte.
MAX_REMEMBERED = 64


class GrammarCompiler:
    """Compiles grammars for one target. `begin` may be called from any thread.

    Where a target or a machine cannot have grammars, requests with one are refused; all others work.
    """

    def __init__(self, tokenizer_json: bytes, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._vocabulary = _vocabulary(tokenizer_json, vocab_size, eos_token_ids)
        # What became of the latest grammars, the most recently used one last. Only the worker touches it.
        self._compiled: OrderedDict[Grammar, CompiledGrammar | CoppiceError] = OrderedDict()
        # One thread: however many grammars come at once, passes lose one core at most.
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="verifier-grammar")

    def begin(
        self,
        grammar: Grammar,
        output: Sequence[int],
        end_token_ids: Sequence[int],
        deliver: Callable[[GrammarState | CoppiceError], None],
    ) -> None:
        """Find the state of a grammar behind the tokens of an output; `deliver` gets it, or why there is none.

        It is called on another thread.
        """
        self._worker.submit(lambda: deliver(self._begin(grammar, output, end_token_ids)))

    def close(self) -> None:
        """Finish the grammar that is being compiled, and forget the others."""
        self._worker.shutdown(cancel_futures=True)

    def _begin(
        self, grammar: Grammar, output: Sequence[int], end_token_ids: Sequence[int]
    ) -> GrammarState | CoppiceError:
        vocabulary = self._vocabulary
        if isinstance(vocabulary, CoppiceError):
            return vocabulary
        try:
            compiled = self._remembered(grammar, vocabulary)
            if isinstance(compiled, CoppiceError):
                return compiled
            return vocabulary.begin(compiled, output, end_token_ids)
        except CoppiceError as error:
            return error
        except BaseException:  # a panic of the library is no Exception; its request must hear of it all the same
            logger.exception("a grammar could not be compiled")
            return CoppiceError("the grammar could not be compiled")

    def _remembered(self, grammar: Grammar, vocabulary: GrammarVocabulary) -> CompiledGrammar | CoppiceError:
        """What a grammar was compiled to, or why it could not be: a bad one is not tried twice."""
        if grammar not in self._compiled:
            try:
                self._compiled[grammar] = vocabulary.compile(grammar)
            except CoppiceError as error:
                self._compiled[grammar] = error
            if len(self._compiled) > MAX_REMEMBERED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return self._compiled[grammar]


def _vocabulary(
    tokenizer_json: bytes, vocab_size: int, eos_token_ids: Sequence[int]
) -> GrammarVocabulary | CoppiceError:
    """What grammars need to know of the target; the error for requests with a grammar, where that is not to be had."""
    try:
        # Here, so that everything else works where llguidance is not installed.
        from verifier_svc.grammar import GrammarVocabulary

        return GrammarVocabulary(tokenizer_json, vocab_size, eos_token_ids)
    except ImportError:
        reason = "llguidance is not installed"
    except UnsupportedError as refusal:
        reason = str(refusal)
    logger.warning("grammars are not offered: %s", reason)
    # Why is the operator's business.
    return UnsupportedError("sampling.grammar: not offered by this server")
