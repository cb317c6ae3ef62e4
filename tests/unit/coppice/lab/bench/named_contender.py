"""A contender of reports that are made by hand."""

from __future__ import annotations

from dataclasses import dataclass

from coppice.lab.bench.contenders import Completion, Task


@dataclass(frozen=True)
class NamedContender:
    """Only looked at: asking it for a completion is a mistake of the test."""

    name: str
    note: str = "made up"

    def complete(self, task: Task) -> Completion:
        raise AssertionError(f"{self.name} is only looked at")
