"""Tables of simulations."""

from __future__ import annotations

from collections.abc import Sequence

from coppice.lab.bench.harness.tables import Row, Table, print_tables

ANSWERS = Table(
    "Simulated",
    "policy tokens_per_s ttft_ms_p50 ttft_ms_p99 tpot_ms_p50 tpot_ms_p99 rows_per_pass mean_acceptance_length "
    "drafters_busy drafters_needed",
    label="{load}",
)
# An error in one of the figures tells where tokens per second come from.
_FIGURES = (
    "tokens_per_s",
    "mean_acceptance_length",
    "rows_per_pass",
    "passes_per_s",
    "pass_ms",
    "drafted_share",
    "drafts_per_s",
)
COMPARISON = Table(
    "Measured and simulated",
    " ".join(["simulated/measured", *(f"measured_{name} {name}" for name in _FIGURES)]),
    label=lambda row: f"{row['name']} (fitted)" if row["is_fitted"] else row["name"],
)


def show(table: Table, rows: Sequence[Row], *notes: str) -> None:
    """Print a table of rows, and notes."""
    report = {"rows": rows, "ratios": {}, "notes": notes, "mismatches": (), "settings": {}}
    print_tables(report, [table], line="", ratio_title="")
