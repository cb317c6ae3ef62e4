"""Drafters of one request: joined, asked for the next draft, told of outcomes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from orchestrator.peers.drafter_client import DrafterClient, DraftHandler
from orchestrator.planner.base import RoundPlan
from orchestrator.request.better_trees import AskTimes
from orchestrator.request.rounds import Outcome
from orchestrator.request.transcript import Transcript


class DrafterSet:
    """Asks drafters as plans say; a drafter joins when its draft is first wanted and stays until the end."""

    def __init__(
        self, clients: Sequence[DrafterClient], handler: DraftHandler, transcript: Transcript, ask_times: AskTimes
    ) -> None:
        """`handler` receives drafts; `ask_times` notes each request for one."""
        self._clients = tuple(clients)
        self._handler = handler
        self._transcript = transcript
        self._ask_times = ask_times
        # Joined drafters with the request's sequence id there, and drafters not joined yet.
        self._members: dict[DrafterClient, int] = {}
        self._unjoined = list(self._clients)
        # Drafters that have more than the last round's tokens to read before their next tree.
        self._reading: set[DrafterClient] = set()
        # Length from which a drafter was not told of commits, because its drafts were not wanted.
        self._withheld_from: dict[DrafterClient, int] = {}

    @property
    def feature_size(self) -> int:
        """Size of the features that drafters need, in numbers per token (the same for all); 0 if none needs any."""
        return next((client.feature_size for client in self._clients if client.needs_features), 0)

    @property
    def max_prompt_features(self) -> int:
        """Most tokens of a prompt, the last ones, whose features any drafter reads."""
        return max((client.max_prompt_features for client in self._clients), default=0)

    @property
    def are_several(self) -> bool:
        """Whether the request has more than one drafter."""
        return len(self._clients) > 1

    @property
    def has_any(self) -> bool:
        """Whether any drafter can be asked for the next round."""
        return any(self._at_hand())

    @property
    def choice(self) -> tuple[str, ...]:
        """Kinds to choose from; empty if a drafter needs features, since it must hear of every outcome."""
        if not self.are_several or self.feature_size:
            return ()
        kinds = tuple(client.kind for client in self._at_hand())
        return kinds if len(kinds) > 1 else ()

    @property
    def asked(self) -> list[str]:
        """Kinds of drafters that were asked for the current round's draft."""
        return [
            client.kind
            for client, sequence_id in self._members.items()
            if client.follows(sequence_id) and client not in self._withheld_from
        ]

    def of_kinds(self, kinds: Collection[str]) -> Iterator[tuple[DrafterClient, int]]:
        """Joined drafters of these kinds, with their sequence ids."""
        return ((client, number) for client, number in self._members.items() if client.kind in kinds)

    def join(self, plan: RoundPlan) -> None:
        """Join the drafters that the plan wants."""
        unjoined = self._unjoined
        self._unjoined = [client for client in unjoined if client.kind in plan.left_out]
        for client in unjoined:
            if client.kind not in plan.left_out:
                self._members[client] = client.join(self._handler)
                self._reading.add(client)

    def tree_arrived(self, kind: str) -> None:
        """Record a tree of the drafter of this kind: it has read what it was told."""
        if self._reading:
            self._reading = {client for client in self._reading if client.kind != kind}

    def tell(self, outcome: Outcome, plan: RoundPlan) -> None:
        """Report the outcome to the drafters that the plan wants, which asks them for the next draft.

        Drafters that need features hear of every outcome, because features are sent only once. Others that are still
        reading when their drafts are not wanted any more are told to stop.
        """
        for client, sequence_id in self._members.items():
            if (plan.max_nodes and client.kind not in plan.left_out) or client.needs_features:
                told = outcome
                if (start := self._withheld_from.pop(client, None)) is not None:
                    told = replace(outcome, base_length=start, token_ids=tuple(self._transcript.tokens[start:]))
                    self._reading.add(client)
                client.outcome(sequence_id, told, plan.max_nodes, plan.row_multiple)
                self._ask_times.note(self._transcript.length)
            elif client in self._reading:
                self._reading.remove(client)
                client.outcome(sequence_id, outcome, 0, plan.row_multiple)
                self._withheld_from[client] = self._transcript.length
            else:
                self._withheld_from.setdefault(client, outcome.base_length)
        if plan.max_nodes and self._unjoined:
            self.join(plan)

    def show_prompt(self, first_token: int, features: bytes) -> None:
        """Pass features of the prompt's tokens from `first_token` on to the drafters that read them."""
        for client, sequence_id in self._members.items():
            client.show_prompt(sequence_id, first_token, features)

    def replace(self, gone: DrafterClient, other: DrafterClient) -> None:
        """Move the request to another drafter of the same kind."""
        gone.leave(self._members.pop(gone))
        self._reading.discard(gone)
        was_withheld = self._withheld_from.pop(gone, None) is not None
        if other in self._members or other in self._unjoined:
            # It was of another kind when the request began.
            return
        if not was_withheld:
            self._members[other] = other.join(self._handler)
            self._reading.add(other)
        else:
            self._unjoined.append(other)

    def leave(self) -> None:
        """Leave all drafters."""
        members, self._members = self._members, {}
        self._unjoined.clear()
        for client, sequence_id in members.items():
            client.leave(sequence_id)

    def _at_hand(self) -> Iterator[DrafterClient]:
        """Drafters that can be asked for the next round."""
        yield from (client for client, sequence_id in self._members.items() if client.follows(sequence_id))
        yield from (client for client in self._unjoined if client.connected)
