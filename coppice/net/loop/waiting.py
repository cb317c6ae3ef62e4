"""Calls that wait for a place in a connection: clients take turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from coppice.net.loop.call import LoopCall

AnyCall = LoopCall[Any]


class WaitingCalls:
    """Calls by client, each client's in order of arrival; a call that ends here leaves at once."""

    def __init__(self) -> None:
        # Clients in the order of their turns.
        self._of_clients: dict[str, dict[AnyCall, None]] = {}

    def __len__(self) -> int:
        """Calls that wait."""
        return sum(map(len, self._of_clients.values()))

    def add(self, call: AnyCall) -> None:
        """Add a call; `on_cancel` is its departure until it is taken."""
        self._of_clients.setdefault(call.client, {})[call] = None
        call.on_cancel = lambda: self._remove(call)

    def take(self, may_begin: Callable[[str], bool]) -> AnyCall | None:
        """The next call of the next client that may begin one; None if there is none."""
        client = next(filter(may_begin, self._of_clients), None)
        if client is None:
            return None
        calls = self._of_clients.pop(client)
        call = next(iter(calls))
        del calls[call]
        if calls:
            self._of_clients[client] = calls
        return call

    def take_all(self) -> list[AnyCall]:
        """All calls."""
        taken = [call for calls in self._of_clients.values() for call in calls]
        self._of_clients = {}
        return taken

    def _remove(self, call: AnyCall) -> None:
        calls = self._of_clients.get(call.client, {})
        calls.pop(call, None)
        if not calls:
            self._of_clients.pop(call.client, None)
