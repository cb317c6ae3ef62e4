"""`python -m verifier_svc.grammar.trial_worker`: compiles grammars to measure their cost.

Frames on standard input and output are JSON after a length of 4 bytes, little-endian. The first describes the target,
each further one is a grammar; each is answered with one frame. Ends at the end of standard input. A grammar that
exceeds CPU time or memory ends the process.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

from coppice.core.errors import InvalidRequestError
from coppice.core.grammar import Grammar, GrammarKind
from verifier_svc.grammar.cache import allocated_bytes
from verifier_svc.grammar.matcher import CompiledGrammar, GrammarVocabulary, too_slow
from verifier_svc.grammar.trial import NICENESS, TRIAL_BYTES, TRIAL_CPU_S, read_frame, write_frame

# Tokens of a rehearsed output, and candidates per token, of which the costliest is taken.
_TOKENS = 8
_CANDIDATES = 16


def main() -> None:
    """Answer frames until there are no more."""
    # Signals to the process group are for the parent; this process ends with its input.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    source, sink = os.fdopen(0, "rb"), os.fdopen(1, "wb")
    target = read_frame(source)
    if target is None:
        return
    vocabulary = GrammarVocabulary(target["tokenizer"].encode(), target["vocab_size"], target["eos_token_ids"])
    _limit_memory()
    write_frame(sink, {})
    while (frame := read_frame(source)) is not None:
        # SIGPROF ends the process even inside the library.
        signal.setitimer(signal.ITIMER_PROF, TRIAL_CPU_S)
        answer = _answer(vocabulary, Grammar(GrammarKind(frame["kind"]), frame["text"]))
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_frame(sink, answer)


def _answer(vocabulary: GrammarVocabulary, grammar: Grammar) -> dict[str, Any]:
    """Size of the compiled grammar in bytes, or the error."""
    before = allocated_bytes()
    try:
        compiled = vocabulary.compile(grammar)
        after = allocated_bytes()
        rehearse(vocabulary, compiled)
    except InvalidRequestError as error:
        return {"field": error.field, "refusal": error.description}
    if before is None or after is None:
        return {"bytes": compiled.num_bytes}
    return {"bytes": max(0, after - before)}


def rehearse(vocabulary: GrammarVocabulary, compiled: CompiledGrammar) -> None:
    """Follow a path of costly tokens through the grammar.

    Raises:
        InvalidRequestError: its masks take too long.
    """
    chance = random.Random(1)
    state = vocabulary.begin(compiled, [], [])
    for _ in range(_TOKENS):
        allowed = state.allowed.nonzero()[0].tolist()
        costs = []
        for token in chance.sample(allowed, min(_CANDIDATES, len(allowed))):
            tried = state.copy()
            started_s = time.thread_time()
            # A dead end is reported to the output that reaches it.
            with contextlib.suppress(InvalidRequestError):
                tried.push(token)
                costs.append((time.thread_time() - started_s, token, tried))
            if compiled.is_too_slow:
                raise too_slow(compiled.grammar)
        if not costs:
            return
        state = max(costs, key=lambda cost: cost[:2])[2]


def _limit_memory() -> None:
    """Bound the process's further growth, if the system supports it."""
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        limit = pages * resource.getpagesize() + TRIAL_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main()
