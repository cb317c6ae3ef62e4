"""`coppice bench sampling`: figures of drawing tokens, and tokens that differ."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coppice.cli import bench
from coppice.lab.bench import sampling
from coppice.lab.bench.sampling import KINDS, SamplingPlan, measure_sampling


def test_sampling_writes_figures_by_vocabulary_and_rows(tmp_path: Path) -> None:
    arguments = ["sampling", "--out", str(tmp_path), "--vocab", "600,1500", "--rows", "2,64", "--repeats", "2"]
    result = CliRunner().invoke(bench.app, arguments)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "sampling.json").read_text())
    expected = [(vocab, rows, kind) for vocab in (600, 1500) for rows in (2, 64) for kind in KINDS]
    assert [(row["vocab"], row["rows"], row["kind"]) for row in report["rows"]] == expected
    assert all(row["sampler_ms"] > 0 and row["numpy_ms"] > 0 for row in report["rows"])
    names = {f"{kind}{figure}@{vocab}" for kind in KINDS for figure in ("-ms", "/numpy") for vocab in (600, 1500)}
    assert set(report["ratios"]) == names
    assert report["mismatches"] == []


def test_blocks_of_rows_are_added_up_and_wrong_tokens_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    drawn = sampling._drawn

    def wrong(logits: sampling.Logits, *arguments: object) -> list[int]:
        made.append(len(logits))
        return [token + 1 for token in drawn(logits, *arguments)]  # type: ignore[arg-type]

    monkeypatch.setattr(sampling, "_drawn", wrong)
    monkeypatch.setattr(sampling, "MAX_LOGIT_BYTES", 4 * 600 * 4)
    report = measure_sampling(SamplingPlan((600,), (6,), repeats=2), threads=1)
    assert set(made) == {4, 2}
    assert len(report["mismatches"]) == 2 * 3 * len(KINDS)
