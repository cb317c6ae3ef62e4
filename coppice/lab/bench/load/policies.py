"""The speculation policies that are compared, as requests ask for them."""

from __future__ import annotations

from dataclasses import dataclass

from coppice.v1 import inference_pb2

OFF = "off"
FIXED_SMALL = "fixed-small"
FIXED_LARGE = "fixed-large"
FIXED = (FIXED_SMALL, FIXED_LARGE)
PLANNER = "planner"

SMALL_NODES = 4
LARGE_NODES = 32

Mode = inference_pb2.SpeculationPolicy.Mode


@dataclass(frozen=True, slots=True)
class Policy:
    """A name for a mode and, where it is fixed, the most draft nodes of a round."""

    name: str
    mode: Mode
    max_nodes: int | None = None

    @property
    def note(self) -> str:
        """How it is set up, for the reader of the result."""
        budget = "the server's own" if self.max_nodes is None else self.max_nodes
        return f"{Mode.Name(self.mode)}, node budget: {budget}"

    @property
    def simulated(self) -> str:
        """The name that `coppice simulate` knows it by."""
        return self.name if self.max_nodes is None else f"fixed={self.max_nodes}"


def policies(server_max_nodes: int) -> tuple[Policy, ...]:
    """Off, two fixed budgets within the server's limit, and the server's planner."""
    return (
        Policy(OFF, Mode.MODE_OFF),
        Policy(FIXED_SMALL, Mode.MODE_FORCED, min(SMALL_NODES, server_max_nodes)),
        Policy(FIXED_LARGE, Mode.MODE_FORCED, min(LARGE_NODES, server_max_nodes)),
        Policy(PLANNER, Mode.MODE_AUTO),
    )
