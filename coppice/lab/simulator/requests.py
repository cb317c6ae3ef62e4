"""A request from its arrival to its last token: the orchestrator's own drafting between modelled peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

from coppice.core.sampling import SamplingParams
from coppice.core.tree import TokenTree
from coppice.lab.simulator.drafters import DrafterLink
from coppice.lab.simulator.orchestrators import SimulatedOrchestrator
from coppice.lab.simulator.policies import Policy
from coppice.lab.simulator.profile import Text
from coppice.lab.simulator.sequences import SimulatedSequence
from coppice.lab.simulator.verifiers import SimulatedVerifier
from orchestrator.planner.base import Planner
from orchestrator.request.drafting import Drafting
from orchestrator.request.rounds import Outcome
from orchestrator.request.transcript import Transcript

if TYPE_CHECKING:
    from orchestrator.peers.drafter_client import DrafterClient
# Tokens are numbers that mean nothing here.
VOCAB_SIZE = 1 << 31


class SimulatedRequest:
    """Opens its sequences when it is made, and closes them when its output is complete or `close` is called.

    Where the prompt's tokens are known, the orchestrator's cache drafts from the request's own context, as its own code
    says; of other requests it knows nothing.
    """

    def __init__(
        self,
        orchestrator: SimulatedOrchestrator,
        verifier: SimulatedVerifier,
        planner: Planner,
        policy: Policy,
        text: Text,
        links: Sequence[DrafterLink],
        num_prompt: int,
        max_tokens: int,
        on_end: Callable[[SimulatedRequest], None],
    ) -> None:
        clock, machine = orchestrator.clock, orchestrator.machine
        self._clock = clock
        self._orchestrator = orchestrator
        self._outcome_s = machine.orchestrator.outcome_s
        self._message_s = machine.message_s
        self._verifier = verifier
        self._links = links
        self._on_end = on_end
        # A prompt of another length than the record's has other tokens.
        prompt = list(text.prompt) if len(text.prompt) == num_prompt else [0] * num_prompt
        self._transcript = Transcript(prompt, (), max_tokens, num_prompt + max_tokens, (), ())
        cache = None
        if policy.speculates and len(text.prompt) == num_prompt:
            cache = orchestrator.own_context.drafter(self._transcript.tokens, num_prompt)
        self._drafting = Drafting(
            clients=cast("Sequence[DrafterClient]", links),
            planner=planner.follow(is_greedy=True),
            transcript=self._transcript,
            sampling=SamplingParams(temperature=0.0),
            requested_nodes=policy.max_nodes,
            forced=policy.forced,
            vocab_size=VOCAB_SIZE,
            row_multiple=machine.verifier.row_multiple,
            cache=cache,
            clock=lambda: clock.now_s,
        )
        self.max_tokens = max_tokens
        self.opened_s = clock.now_s
        # When its first and its last tokens came; None before.
        self.first_s: float | None = None
        self.ended_s: float | None = None
        self.is_open = True
        self.num_rounds = 0
        self._drafting.open()
        self._sequence = SimulatedSequence(
            text,
            num_prompt,
            max_tokens,
            machine.verifier.max_nodes,
            self._drafting.opening_linger_us() / 1e6,
            self._on_outcome,
        )
        self._drafting.opened(self._send)
        verifier.open(self._sequence)

    @property
    def num_tokens(self) -> int:
        """Tokens of the output so far."""
        return self._transcript.num_generated

    @property
    def num_asked(self) -> int:
        return sum(link.asked for link in self._links)

    def close(self) -> None:
        """End the request as it is."""
        if self.is_open:
            self.is_open = False
            self._drafting.close()
            self._verifier.close(self._sequence)

    def _send(self, base_length: int, tree: TokenTree, budget: int, linger_us: int | None) -> None:
        linger_s = None if linger_us is None else linger_us / 1e6

        def arrive() -> None:
            if self.is_open:
                self._sequence.submit(base_length, tree, budget, linger_s)
                self._verifier.look()

        self._clock.later(self._message_s, arrive)

    def _on_outcome(self, outcome: Outcome) -> None:
        """The verifier sends it; the orchestrator takes it when its turn comes."""

        def arrive() -> None:
            self._orchestrator.handle(self._outcome_s, lambda: self._on_round(outcome))

        self._clock.later(self._message_s, arrive)

    def _on_round(self, outcome: Outcome) -> None:
        if not self.is_open:
            return
        self._transcript.append(outcome.token_ids)
        self._drafting.load = self._verifier.load
        self.num_rounds += 1
        if self.first_s is None:
            self.first_s = self._clock.now_s
        ended = self._transcript.end() is not None
        sent = self._drafting.round_ended(outcome) if ended else self._drafting.round_done(outcome)
        if not ended:
            self._drafting.round_passed(outcome)
        self._drafting.learn(outcome, sent)
        if ended:
            self.ended_s = self._clock.now_s
            self.close()
            self._on_end(self)
