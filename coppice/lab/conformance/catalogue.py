"""A case, and every case there is: each module of `coppice.lab.conformance.groups` holds one `GROUP`."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from coppice.lab.conformance import groups
from coppice.lab.conformance.deployment import Deployment

Check = Callable[[Deployment], Awaitable[None]]


@dataclass(frozen=True)
class Case:
    """One promise, named `group/what-is-promised`; the check raises unless the deployment keeps it."""

    name: str
    check: Check


class Group:
    """The cases of one file, in their order. Each first asks `require`, which skips it where it cannot be run."""

    def __init__(self, name: str, require: Check | None = None) -> None:
        self.name = name
        self.cases: list[Case] = []
        self._require = require

    def add(self, name: str, check: Callable[..., Awaitable[None]], *args: Any, **knobs: Any) -> None:
        """Add a check with its further arguments as a case, whose full name begins with the group's."""

        async def run(deployment: Deployment) -> None:
            if self._require is not None:
                await self._require(deployment)
            await check(deployment, *args, **knobs)

        self.cases.append(Case(f"{self.name}/{name}", run))

    def case(self, name: str) -> Callable[[Check], Check]:
        """As a decorator: add the function that follows."""

        def added(check: Check) -> Check:
            self.add(name, check)
            return check

        return added


def all_groups() -> list[Group]:
    """The groups, by the names of their modules; a new one is a new file."""
    names = sorted(module.name for module in pkgutil.iter_modules(groups.__path__))
    return [importlib.import_module(f"{groups.__name__}.{name}").GROUP for name in names]


def cases_like(patterns: Sequence[str]) -> list[Case]:
    """The cases whose name matches one of the patterns, as in file names; all of them without a pattern."""
    cases = [case for group in all_groups() for case in group.cases]
    return [case for case in cases if not patterns or any(fnmatchcase(case.name, pattern) for pattern in patterns)]
