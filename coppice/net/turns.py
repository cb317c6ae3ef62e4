"""Work that waits: hosts take turns, and so do the connections of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Turns(Generic[Item]):
    """Items by host and connection, each connection's in order of arrival."""

    def __init__(self) -> None:
        # Hosts, and the connections of each, in the order of their turns.
        self._of_hosts: dict[str, dict[str, dict[Item, None]]] = {}

    def __len__(self) -> int:
        """Items that wait."""
        return sum(len(items) for of_host in self._of_hosts.values() for items in of_host.values())

    def __bool__(self) -> bool:
        """Whether any waits."""
        return bool(self._of_hosts)

    def add(self, item: Item, host: str, connection: str) -> None:
        """Add an item of a connection."""
        self._of_hosts.setdefault(host, {}).setdefault(connection, {})[item] = None

    def remove(self, item: Item, host: str, connection: str) -> None:
        """Remove an item; without effect if it does not wait."""
        of_host = self._of_hosts.get(host, {})
        items = of_host.get(connection, {})
        items.pop(item, None)
        if not items:
            of_host.pop(connection, None)
        if not of_host:
            self._of_hosts.pop(host, None)

    def take(self, may_go: Callable[[str, str], bool]) -> Item | None:
        """The next item of the next host's next connection that may go on; None if there is none."""
        for host, of_host in self._of_hosts.items():
            for connection, items in of_host.items():
                if may_go(host, connection):
                    item = next(iter(items))
                    _to_the_end(of_host, connection)
                    _to_the_end(self._of_hosts, host)
                    self.remove(item, host, connection)
                    return item
        return None

    def take_all(self) -> list[Item]:
        """All items."""
        taken = [item for of_host in self._of_hosts.values() for items in of_host.values() for item in items]
        self._of_hosts = {}
        return taken


def _to_the_end(of_names: dict[str, dict[str, dict[Item, None]]] | dict[str, dict[Item, None]], name: str) -> None:
    of_names[name] = of_names.pop(name)  # type: ignore[assignment]
