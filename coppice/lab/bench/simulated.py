"""Tables of simulations."""

from __future__ import annotations

from collections.abc import Sequence

from coppice.lab.bench.harness.tables import Row, Table, print_tables

ANSWERS = Table(
    "Simulated: milliseconds are p50 / p99",
    {
        "policy": "{policy}",
        "tokens/s": "{tokens_per_s:.0f}",
        "TTFT ms": "{ttft_ms_p50:.0f} / {ttft_ms_p99:.0f}",
        "ms per token": "{tpot_ms_p50:.1f} / {tpot_ms_p99:.1f}",
        "rows per pass": "{rows_per_pass:.1f}",
        "τ": "{mean_acceptance_length:.2f}",
        "drafters busy": "{drafters_busy:.2f}",
        "drafters needed": "{drafters_needed}",
    },
    label="{load}",
)
# An error in one of the last six columns tells where tokens per second come from.
COMPARISON = Table(
    "Measured → simulated",
    {
        "tokens/s": "{measured_tokens_per_s:.0f} → {tokens_per_s:.0f}",
        "simulated/measured": "{simulated/measured:.3f}",
        "τ": "{measured_mean_acceptance_length:.2f} → {mean_acceptance_length:.2f}",
        "rows/pass": "{measured_rows_per_pass:.0f} → {rows_per_pass:.0f}",
        "passes/s": "{measured_passes_per_s:.1f} → {passes_per_s:.1f}",
        "pass ms": "{measured_pass_ms:.1f} → {pass_ms:.1f}",
        "drafted rounds": "{measured_drafted_share:.2f} → {drafted_share:.2f}",
        "drafts/s": "{measured_drafts_per_s:.0f} → {drafts_per_s:.0f}",
    },
    label=lambda row: f"{row['name']} (fitted)" if row["is_fitted"] else row["name"],
)


def show(table: Table, rows: Sequence[Row], *notes: str) -> None:
    """Print a table of rows, and notes."""
    report = {"rows": rows, "ratios": {}, "notes": notes, "mismatches": (), "settings": {}}
    print_tables(report, [table], line="", ratio_title="")
