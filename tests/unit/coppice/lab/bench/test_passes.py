"""The benchmark of single passes, on a tiny target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from coppice.cli import bench
from coppice.kernels.cpu.vector_code import HAS_WIDE_REGISTERS
from coppice.lab.bench import passes
from coppice.lab.bench.passes import pass_ratios, plain_pass, slopes
from tests.unit.coppice.lab.bench.schema import lost_fields
from verifier_svc.config import VerifierConfig
from verifier_svc.model import loading
from verifier_svc.model.compiled_layers import CompiledLayers
from verifier_svc.model.compiled_products import products_of


def test_the_price_of_a_row_is_the_slope_up_to_the_bound() -> None:
    times = [
        {"context": context, "rows": rows, "coppice_ms": ours, "transformers_ms": theirs}
        for context, rows, ours, theirs in (
            *((64, rows, 3 + 0.5 * rows, 2 + rows) for rows in (1, 2, 4, 32)),
            (64, 64, 1000.0, 1000.0),
            (8, 1, 9.0, 9.0),
        )
    ]
    assert slopes(times, 64) == pytest.approx({"coppice": 0.5, "transformers": 1.0})
    assert slopes(times, 8) == {}


def test_passes_of_more_rows_are_compared_with_one_row_after_one_context() -> None:
    sizes = ((64, 1, 1.0), (64, 16, 9.0), (256, 1, 2.0), (256, 16, 3.0), (256, 32, 5.0))
    rows = [
        {"context": context, "rows": size, "coppice_ms": ms, "ratio": 0.5, "strict_over_fast": None}
        | {"not_products": 0.25 if (context, size) == (256, 32) else None}
        for context, size, ms in sizes
    ]
    alone = {"pass/transformers.context-64": 0.5, "pass/transformers.context-256": 0.5}
    assert pass_ratios(rows) == alone | {
        "rows16/rows1": 1.5,
        "rows32/rows1": 2.5,
        "not-products/pass.rows-32": 0.25,
    }
    # Without a pass of one row there is nothing to compare with.
    assert pass_ratios(rows[3:4]) == {}


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
    arguments += ["--rows", "1,4,8", "--context", "16,40", "--device", "cpu"]
    result = CliRunner().invoke(bench.app, arguments)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "passes.json").read_text())
    assert report["settings"]["device"] == "cpu"
    assert [(row["context"], row["rows"]) for row in report["rows"]] == [(c, r) for c in (16, 40) for r in (1, 4, 8)]
    assert all(row["coppice_ms"] > 0 and row["transformers_ms"] > 0 for row in report["rows"])
    assert all((row["products_ms"] is None) != HAS_WIDE_REGISTERS for row in report["rows"])
    assert all(row["fast_ms"] > 0 and row["strict_over_fast"] > 0 for row in report["rows"])
    assert set(report["ratios"]) == {
        *(f"pass/transformers.context-{context}" for context in (16, 40)),
        *(f"strict/fast.context-{context}.rows-{rows}" for context in (16, 40) for rows in (1, 4, 8)),
    }
    assert passes.NOT_STRICT not in report["notes"]
    assert lost_fields(report, "passes.json") == set()
    assert (tmp_path / "passes.png").is_file()
    assert "A further row after 40 tokens" in result.output


@pytest.mark.skipif(not HAS_WIDE_REGISTERS, reason="layers are compiled for vectors of 512 bits")
def test_products_are_those_of_all_layers_and_of_the_output(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    target, _ = loading.load_probed_target(VerifierConfig.from_env({}, model=str(tiny_target), dtype="float32"))
    layers, run = target.layers, products_of(target)
    assert isinstance(layers, CompiledLayers)
    assert run is not None
    buffers = layers.buffers(3)
    for inputs in (buffers.normed, buffers.seen_rows, buffers.gated):
        inputs[:] = 1
    seen: list[int] = []
    monkeypatch.setattr(target.model.get_output_embeddings(), "forward", lambda rows: seen.append(len(rows)))
    run(3)
    # What is left in the buffers is of the last layer.
    last = plain.model.layers[-1]
    qkv = torch.cat(
        [part.weight.sum(1) for part in (last.self_attn.q_proj, last.self_attn.k_proj, last.self_attn.v_proj)]
    )
    down = last.mlp.down_proj.weight.sum(1)
    for got, wanted in ((buffers.qkv, qkv), (buffers.change, down)):
        rows = torch.from_numpy(got)[:, : len(wanted)]
        torch.testing.assert_close(rows, wanted.detach().expand_as(rows), rtol=1e-4, atol=1e-5)
    assert seen == [3]


def test_where_strict_mode_is_not_offered_its_cost_is_not_made_up(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "rows_stand_alone", lambda *_: False)
    report = passes.measure_passes(tiny_target, passes.PassesPlan((16,), (1, 2), repeats=2), threads=1)
    assert [(row["fast_ms"], row["strict_over_fast"]) for row in report["rows"]] == [(None, None)] * 2
    assert list(report["ratios"]) == ["pass/transformers.context-16"]
    assert passes.NOT_STRICT in report["notes"]
