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


def _measured_and_simulated(title: str, first: str, *names: str) -> Table:
    return Table(
        f"Measured and simulated {title}",
        " ".join([first, *(f"measured_{name} {name}" for name in names)]).strip(),
        label=lambda row: f"{row['name']} (fitted)" if row["is_fitted"] else row["name"],
    )


# An error in one of the figures tells where tokens per second come from.
COMPARISON = (
    _measured_and_simulated("rates", "simulated/measured", "tokens_per_s", "passes_per_s", "drafts_per_s"),
    _measured_and_simulated("passes", "", "mean_acceptance_length", "rows_per_pass", "pass_ms", "drafted_share"),
)


def show(tables: Sequence[Table], rows: Sequence[Row], *notes: str) -> None:
    """Print tables of the same rows, and notes."""
    report = {"rows": rows, "ratios": {}, "notes": notes, "mismatches": (), "settings": {}}
    print_tables(report, tables, line="", ratio_title="")
