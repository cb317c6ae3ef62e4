"""Every case there is: each module of `coppice.lab.conformance.groups` holds one `GROUP`."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from fnmatch import fnmatchcase

from coppice.lab.conformance import groups
from coppice.lab.conformance.case import Case, Group


def all_groups() -> list[Group]:
    """The groups, by the names of their modules; a new one is a new file."""
    names = sorted(module.name for module in pkgutil.iter_modules(groups.__path__))
    return [importlib.import_module(f"{groups.__name__}.{name}").GROUP for name in names]


def cases_like(patterns: Sequence[str]) -> list[Case]:
    """The cases whose name matches one of the patterns, as in file names; all of them without a pattern."""
    cases = [case for group in all_groups() for case in group.cases]
    return [case for case in cases if not patterns or any(fnmatchcase(case.name, pattern) for pattern in patterns)]
