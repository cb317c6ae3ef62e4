"""What a verifier counts of its passes."""

from __future__ import annotations

from dataclasses import dataclass

from coppice.lab.bench.counters import Counters, read_counters

_PREFIX = "coppice_verifier_"
PASSES = f"{_PREFIX}pass_seconds_count"
PASS_S = f"{_PREFIX}pass_seconds_sum"
ROWS = f"{_PREFIX}pass_rows_sum"
# The passes that these rows were of: one may end between the reading of its seconds and that of its rows.
ROW_PASSES = f"{_PREFIX}pass_rows_count"
NODES = f"{_PREFIX}spec_decode_num_draft_tokens_total"
MASKS = f"{_PREFIX}masks_total"
# Only there where the verifier has a head.
PRUNED_NODES = f"{_PREFIX}early_pruned_nodes_total"
PRUNED_PASSES = f"{_PREFIX}early_pruned_passes_total"
# Of passes that could be pruned, by whether they were.
PRUNABLE_ROWS = f"{_PREFIX}prunable_pass_rows_total"
PRUNABLE_S = f"{_PREFIX}prunable_pass_seconds_total"
_NAMES = (PASSES, PASS_S, ROWS, ROW_PASSES, NODES, MASKS, PRUNED_NODES, PRUNED_PASSES, PRUNABLE_ROWS, PRUNABLE_S)


@dataclass(frozen=True, slots=True)
class PassCounts(Counters):
    """Counts of passes, or what they grew by."""

    @property
    def num_passes(self) -> int:
        """Forward passes."""
        return round(self.total(PASSES))

    @property
    def num_pruned_passes(self) -> int:
        """Those in which early pruning was done."""
        return round(self.total(PRUNED_PASSES))

    @property
    def ms_per_pass(self) -> float | None:
        """Milliseconds of a pass."""
        return self._per_pass(1000 * self.total(PASS_S))

    @property
    def rows_per_pass(self) -> float | None:
        """Rows of a pass as it begins, without padding."""
        passes = round(self.total(ROW_PASSES))
        return self.total(ROWS) / passes if passes else None

    @property
    def rows_left(self) -> float | None:
        """Rows of a pass behind the layer at which it is pruned."""
        return self._per_pass(self.total(ROWS) - self.total(PRUNED_NODES))

    @property
    def masks_per_pass(self) -> float | None:
        """Rows of a pass that are masks."""
        return self._per_pass(self.total(MASKS))

    @property
    def removed_share(self) -> float | None:
        """Share of the tree nodes that early pruning removed."""
        return self.total(PRUNED_NODES) / self.total(NODES) if self.total(NODES) else None

    def ms_per_row(self, *, pruned: bool) -> float | None:
        """Milliseconds, for each row that they began with, of the passes that could be pruned and were, or were not."""
        label = (("pruned", "yes" if pruned else "no"),)
        rows = self.values.get((PRUNABLE_ROWS, label), 0.0)
        return 1000 * self.values.get((PRUNABLE_S, label), 0.0) / rows if rows else None

    def _per_pass(self, value: float) -> float | None:
        return value / self.num_passes if self.num_passes else None


def read_passes(url: str) -> PassCounts:
    """What a verifier has counted until now.

    Raises:
        BenchmarkError: its metrics cannot be had.
    """
    return PassCounts(read_counters(url, _NAMES, "a verifier"))
