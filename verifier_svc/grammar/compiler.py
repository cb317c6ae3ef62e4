"""Compilation of grammars on separate threads, so that neither the event loop nor passes wait.

Short grammars known to be cheap have a thread of their own. Others are first compiled in another process (`trial.py`),
and here only if that stayed within limits.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from coppice.core.errors import CoppiceError, InvalidRequestError, UnsupportedError
from coppice.core.grammar import Grammar, GrammarKind
from coppice.heap import release_memory
from coppice.obs.metrics import histogram
from verifier_svc.grammar.cache import GrammarCache
from verifier_svc.grammar.queue import Deliver, GrammarQueue, Job
from verifier_svc.grammar.trial import NICENESS, GrammarTrial

if TYPE_CHECKING:
    from verifier_svc.grammar.matcher import CompiledGrammar, GrammarState, GrammarVocabulary

logger = logging.getLogger(__name__)

# A text of at most this many characters without the keys below compiles in at most 60 ms and 2 MiB.
_PLAIN_CHARACTERS = 4096
# Keys that multiply or intersect parts of a schema.
_COMBINES = ('"allOf"', '"oneOf"', '"patternProperties"', '"multipleOf"', '"x-guidance"')
# Keys that do so together with a pattern, and with a reference.
_MEETS_PATTERN = ('"anyOf"', '"$ref"', '"format"', '"minLength"', '"maxLength"')
# Total memory of compiled grammars that needed a trial, those used by running outputs included. Above it, the next
# compilation waits until outputs have ended.
MAX_TRIED_BYTES = 256 << 20
_ROOM_CHECK_S = 0.05
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class GrammarCounts:
    """Metrics of grammar compilation."""

    def __init__(self) -> None:
        # Grammars by result; cache hits count in `remembered` only.
        self.results = dict.fromkeys(("compiled", "refused", "failed", "remembered"), 0)
        self.queue_s = histogram("coppice_verifier_grammar_queue_seconds", "Time that a grammar waited.", _SECONDS)
        self.num_trials = 0
        self._lock = threading.Lock()

    def add(self, result: str, num: int = 1) -> None:
        """Count grammars; may be called from any thread."""
        with self._lock:
            self.results[result] += num


class GrammarCompiler:
    """Compiles grammars for one target. Public methods are thread-safe.

    If the target or the machine does not support grammars, only requests with one are refused.
    """

    def __init__(self, tokenizer_json: bytes, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._vocabulary = _vocabulary(tokenizer_json, vocab_size, eos_token_ids)
        self._cache = GrammarCache()
        self._trial = GrammarTrial(tokenizer_json, vocab_size, eos_token_ids)
        self._tried: weakref.WeakSet[CompiledGrammar] = weakref.WeakSet()
        self._plain, self._other = GrammarQueue(), GrammarQueue()
        self._closing = threading.Event()
        self.counts = GrammarCounts()
        self._threads = [
            threading.Thread(target=self._run, args=(queue, needs_trial), name=name, daemon=True)
            for queue, needs_trial, name in (
                (self._plain, False, "verifier-grammar"),
                (self._other, True, "verifier-grammar-trial"),
            )
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_waiting(self) -> int:
        """Grammars waiting to be compiled."""
        return len(self._plain) + len(self._other)

    @property
    def cache_bytes(self) -> int:
        """Memory of cached grammars."""
        return self._cache.num_bytes

    def begin(
        self,
        grammar: Grammar,
        output: Sequence[int],
        end_token_ids: Sequence[int],
        deliver: Deliver,
        payer: str = "",
    ) -> Callable[[], None]:
        """Compute the grammar's state after an output's tokens; `deliver` gets it, or the error, on another thread.

        Jobs with the same `payer` share their turns. Returns a function that cancels the job; if the job has left the
        queue already, `deliver` may still be called.
        """
        job = Job(grammar, output, end_token_ids, deliver, payer)
        queue = self._plain if is_plain(grammar) or self._cache.find(grammar) is not None else self._other
        queue.put(job)
        return lambda: queue.cancel(job)

    def close(self) -> None:
        """Finish the grammar that is being compiled, and drop the others."""
        self._closing.set()
        self._plain.close()
        self._other.close()
        self._trial.stop()
        for thread in self._threads:
            thread.join()
        self._trial.close()

    def _run(self, queue: GrammarQueue, needs_trial: bool) -> None:
        if sys.platform == "linux":
            # Lower priority than passes, for this thread only; on other systems it would be the whole process's.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while (jobs := queue.take()) is not None:
            started_s = time.monotonic()
            grammar = jobs[0].grammar
            for job in jobs:
                self.counts.queue_s.observe(started_s - job.came_s)
            compiled = self._compiled(grammar, needs_trial)
            for job in jobs:
                job.deliver(self._state(compiled, job))
            queue.charge(jobs[0].payer, time.monotonic() - started_s)
            del compiled, jobs

    def _compiled(self, grammar: Grammar, needs_trial: bool) -> CompiledGrammar | CoppiceError:
        """The compiled grammar, or the error."""
        vocabulary = self._vocabulary
        if isinstance(vocabulary, CoppiceError):
            return vocabulary
        remembered = self._cache.find(grammar)
        if remembered is not None:
            self.counts.add("remembered")
            return remembered
        try:
            result: CompiledGrammar | CoppiceError = (
                self._compile_tried(vocabulary, grammar) if needs_trial else vocabulary.compile(grammar)
            )
            self.counts.add("compiled")
        except InvalidRequestError as error:
            self.counts.add("refused")
            result = error
        except CoppiceError as error:  # not cached: may succeed later
            self.counts.add("failed")
            return error
        except BaseException:  # a panic of the library is not an Exception
            logger.exception("a grammar could not be compiled")
            self.counts.add("failed")
            return CoppiceError("the grammar could not be compiled")
        if self._cache.put(grammar, result) or needs_trial:
            release_memory()
        return result

    def _compile_tried(self, vocabulary: GrammarVocabulary, grammar: Grammar) -> CompiledGrammar:
        """Compile a grammar after a trial within limits, once there is memory for it.

        Raises:
            InvalidRequestError: it exceeds limits.
            CoppiceError: the trial failed.
        """
        self.counts.num_trials += 1
        size = self._trial.measure(grammar)
        while sum(compiled.num_bytes for compiled in list(self._tried)) + size > MAX_TRIED_BYTES:
            if self._closing.wait(_ROOM_CHECK_S):
                raise CoppiceError("the verifier is stopping")
        compiled = vocabulary.compile(grammar)
        compiled.num_bytes = size
        self._tried.add(compiled)
        return compiled

    def _state(self, compiled: CompiledGrammar | CoppiceError, job: Job) -> GrammarState | CoppiceError:
        vocabulary = self._vocabulary
        if isinstance(vocabulary, CoppiceError):
            return vocabulary
        if isinstance(compiled, CoppiceError):
            return compiled
        try:
            return vocabulary.begin(compiled, job.output, job.end_token_ids)
        except CoppiceError as error:
            return error
        except BaseException:  # as above
            logger.exception("a grammar could not be begun")
            return CoppiceError("the grammar could not be compiled")


def is_plain(grammar: Grammar) -> bool:
    """Whether a grammar is known to be cheap, from keys in its text; takes microseconds.

    A regular expression cannot intersect others, and the library's limits bound the rest.
    """
    text = grammar.text
    if len(text) > _PLAIN_CHARACTERS:
        return False
    if grammar.kind is GrammarKind.REGEX:
        return True
    # Keys may contain escapes.
    if "\\u" in text or any(key in text for key in _COMBINES):
        return False
    if '"$ref"' in text and '"anyOf"' in text:
        return False
    return '"pattern"' not in text or not any(key in text for key in _MEETS_PATTERN)


def _vocabulary(
    tokenizer_json: bytes, vocab_size: int, eos_token_ids: Sequence[int]
) -> GrammarVocabulary | CoppiceError:
    """The target's vocabulary for grammars, or the error for requests with a grammar."""
    try:
        # Imported here, so that verifiers without llguidance work.
        from verifier_svc.grammar.matcher import GrammarVocabulary

        return GrammarVocabulary(tokenizer_json, vocab_size, eos_token_ids)
    except ImportError:
        reason = "llguidance is not installed"
    except UnsupportedError as refusal:
        reason = str(refusal)
    logger.warning("grammars are not offered: %s", reason)
    # The reason is for operators only.
    return UnsupportedError("sampling.grammar: not offered by this server")
