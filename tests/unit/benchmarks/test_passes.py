"""The benchmark of single passes, on a tiny target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from benchmarks.passes import PassTimes, plain_pass, slopes
from coppice.cli import bench


def test_the_price_of_a_row_is_the_slope_up_to_the_bound() -> None:
    times = [PassTimes(64, rows, 3 + 0.5 * rows, 2 + rows, 1.0) for rows in (1, 2, 4, 32)]
    times += [PassTimes(64, 64, 1000.0, 1000.0, 1.0), PassTimes(8, 1, 9.0, 9.0, 1.0)]
    assert slopes(times, 64) == pytest.approx({"coppice": 0.5, "transformers": 1.0})
    assert slopes(times, 8) == {}


def test_the_plain_pass_leaves_its_cache_as_it_was(tiny_target: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    seen: list[torch.Tensor] = []
    model.register_forward_hook(lambda _module, _inputs, output: seen.append(output.logits.clone()))
    run = plain_pass(model, [5, 6, 7])
    run([1, 2])
    run([9, 3, 4])
    run([1, 2])
    assert [logits.shape[1] for logits in seen] == [3, 2, 3, 2]
    assert torch.equal(seen[1], seen[3])


def test_passes_writes_json_and_plot_and_prints_a_table(tiny_target: Path, tmp_path: Path) -> None:
    arguments = ["passes", "--target", str(tiny_target), "--out", str(tmp_path), "--threads", "1", "--repeats", "2"]
    result = CliRunner().invoke(bench.app, [*arguments, "--rows", "1,4,8", "--context", "16,40"])
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "passes.json").read_text())
    assert [(row["context"], row["rows"]) for row in report["rows"]] == [(c, r) for c in (16, 40) for r in (1, 4, 8)]
    assert all(row["coppice_ms"] > 0 and row["transformers_ms"] > 0 for row in report["rows"])
    assert set(report["ratios"]) == {"pass/transformers.context-16", "pass/transformers.context-40"}
    assert (tmp_path / "passes.png").is_file()
    assert "A further row behind 40 tokens" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "1,x"], "--rows"),
        (["--context", "0"], "--context"),
        (["--rows", "64", "--context", "64"], "go beyond the target's 96 tokens"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    tiny_target: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    result = CliRunner().invoke(bench.app, ["passes", "--target", str(tiny_target), "--out", str(tmp_path), *arguments])
    assert result.exit_code != 0
    assert message in result.output
