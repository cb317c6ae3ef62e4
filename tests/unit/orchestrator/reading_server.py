"""A server in a modelled clock that runs passes: rounds of all outputs, and prompts in the order of their arrival."""

from __future__ import annotations

import random
from dataclasses import dataclass

from coppice.core.errors import OverloadedError
from orchestrator.admission.admission import Admission, Ticket
from orchestrator.admission.fair_queue import AdmissionRequest

# A pass takes so long by itself, for each round, and for each token of a prompt: about what the bundled pair does on
# two cores.
PASS_S, ROUND_S, PROMPT_TOKEN_S = 0.004, 0.0022, 0.00025
# Prompt tokens of one pass.
CHUNK = 512
# Tokens that a round commits.
COMMITTED = (1, 1, 2, 2, 3, 4)
MIN_PROMPT, MEDIAN_PROMPT, MAX_PROMPT = 22, 80, 266
MIN_TOKENS, MEDIAN_TOKENS, MAX_TOKENS = 16, 48, 128


@dataclass(eq=False)
class Caller:
    """One request, from when it comes until it has ended or is sent away."""

    arrived_s: float
    prompt_left: int
    tokens_left: int
    num_tokens: int
    ticket: Ticket
    first_s: float | None = None

    @property
    def ttft_s(self) -> float:
        """Seconds from its arrival to its first token."""
        assert self.first_s is not None
        return self.first_s - self.arrived_s


class ReadingServer:
    """Passes back to back, as the verifier runs them; who waits longer than the admission lets anybody is gone."""

    def __init__(self, seed: int = 0, **limits: float) -> None:
        self.now_s = 0.0
        self.admission = Admission(256, 256, clock=lambda: self.now_s, **limits)  # type: ignore[arg-type]
        self.ended: list[Caller] = []
        self.num_refused = 0
        # The most prompts that were read by one pass.
        self.most_read = 0
        self._callers: list[Caller] = []
        self._chooser = random.Random(seed)

    def load(self, rate_per_s: float, duration_s: float) -> list[Caller]:
        """Random arrivals for so long; returns those that got in and have ended by then."""
        before, end_s = len(self.ended), self.now_s + duration_s
        next_s = self.now_s + self._chooser.expovariate(rate_per_s)
        while self.now_s < end_s:
            pass_s = self._pass_s()
            ends_s = min(self.now_s + pass_s, end_s) if pass_s else min(next_s, end_s)
            # Arrivals while the pass runs.
            while next_s < ends_s:
                self._at(next_s)
                self._arrive()
                next_s += self._chooser.expovariate(rate_per_s)
            self._at(ends_s)
            if pass_s:
                self._end_pass()
            elif next_s <= self.now_s:
                self._arrive()
                next_s += self._chooser.expovariate(rate_per_s)
        return self.ended[before:]

    def _at(self, now_s: float) -> None:
        """The clock, and whose patience is over by then."""
        longest_s = self.admission.max_wait_s
        for caller in [one for one in self._callers if one.ticket.started_s is None]:
            if longest_s is not None and caller.arrived_s + longest_s <= now_s:
                self.now_s = max(self.now_s, caller.arrived_s + longest_s)
                if caller.ticket.started_s is None:
                    self.num_refused += 1
                    self._leave(caller)
        self.now_s = now_s

    def _arrive(self) -> None:
        prompt = round(min(max(self._chooser.lognormvariate(0, 0.6) * MEDIAN_PROMPT, MIN_PROMPT), MAX_PROMPT))
        tokens = round(min(max(self._chooser.lognormvariate(0, 0.6) * MEDIAN_TOKENS, MIN_TOKENS), MAX_TOKENS))
        try:
            ticket = self.admission.enter(AdmissionRequest("", 1), 1e9, 1)
        except OverloadedError:
            self.num_refused += 1
        else:
            self._callers.append(Caller(self.now_s, prompt, tokens, tokens, ticket))

    def _pass_s(self) -> float:
        """Plan a pass over whom there is now; 0 where nobody is."""
        running = [one for one in self._callers if one.ticket.started_s is not None]
        self._rounds = [one for one in running if not one.prompt_left]
        self._read: list[tuple[Caller, int]] = []
        left = CHUNK
        for caller in running:
            if share := min(caller.prompt_left, left):
                self._read.append((caller, share))
                left -= share
        self.most_read = max(self.most_read, len(self._read))
        return PASS_S + ROUND_S * len(self._rounds) + PROMPT_TOKEN_S * (CHUNK - left) if running else 0.0

    def _end_pass(self) -> None:
        for caller in self._rounds:
            caller.tokens_left -= self._chooser.choice(COMMITTED)
        for caller, share in self._read:
            caller.prompt_left -= share
            if not caller.prompt_left:
                caller.first_s = self.now_s
                caller.tokens_left -= 1
                caller.ticket.tokens_came()
        for caller in [one for one in self._rounds if one.tokens_left <= 0]:
            caller.ticket.num_tokens = caller.num_tokens
            self.ended.append(caller)
            self._leave(caller)

    def _leave(self, caller: Caller) -> None:
        self._callers.remove(caller)
        self.admission.leave(caller.ticket)
