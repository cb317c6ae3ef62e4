"""`python -m verifier_svc.grammar.trial_worker`: compiles grammars to find out whether others can afford to.

Frames on standard input and output are JSON behind their length, 4 bytes in little-endian order. The first one
describes the target, each other one is a grammar; each is answered with one frame. Ends with standard input. A grammar
that takes too much CPU time or memory ends the process.
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

# Tokens of a tried output, and how many are looked at for each: the one that costs most is taken.
_TOKENS = 8
_CANDIDATES = 16


def main() -> None:
    """Answer frames until there are no more."""
    # A signal for the whole group of processes is for the parent, whose end is ours.
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
        # Its signal ends the process, whatever the library is doing.
        signal.setitimer(signal.ITIMER_PROF, TRIAL_CPU_S)
        answer = _answer(vocabulary, Grammar(GrammarKind(frame["kind"]), frame["text"]))
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_frame(sink, answer)


def _answer(vocabulary: GrammarVocabulary, grammar: Grammar) -> dict[str, Any]:
    """The bytes that a grammar takes when it is compiled, or why it cannot be."""
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
    """Try where an output may lead that seeks out what costs most.

    Raises:
        InvalidRequestError: masks on the way take too long.
    """
    chance = random.Random(1)
    state = vocabulary.begin(compiled, [], [])
    for _ in range(_TOKENS):
        allowed = state.allowed.nonzero()[0].tolist()
        costs = []
        for token in chance.sample(allowed, min(_CANDIDATES, len(allowed))):
            tried = state.copy()
            started_s = time.thread_time()
            # A dead end is found out again by whoever gets there.
            with contextlib.suppress(InvalidRequestError):
                tried.push(token)
                costs.append((time.thread_time() - started_s, token, tried))
            if compiled.is_too_slow:
                raise too_slow(compiled.grammar)
        if not costs:
            return
        state = max(costs, key=lambda cost: cost[:2])[2]


def _limit_memory() -> None:
    """From now on the process may grow by a bounded amount, where the system can bound it."""
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        limit = pages * resource.getpagesize() + TRIAL_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main()
