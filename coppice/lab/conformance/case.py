"""A case: a name and a check."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from coppice.lab.conformance.deployment import Deployment

Check = Callable[[Deployment], Awaitable[None]]


@dataclass(frozen=True)
class Case:
    """One promise, named `group/what-is-promised`; the check raises unless the deployment keeps it."""

    name: str
    check: Check


class Group:
    """The cases of one file, in their order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.cases: list[Case] = []

    def add(self, name: str, check: Check) -> None:
        """Add a case; its full name begins with the group's."""
        self.cases.append(Case(f"{self.name}/{name}", check))

    def case(self, name: str) -> Callable[[Check], Check]:
        """As a decorator: add the function that follows."""

        def added(check: Check) -> Check:
            self.add(name, check)
            return check

        return added
