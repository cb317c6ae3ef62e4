"""Families in bfloat16: by products of pairs where the processor has them, with the bits that each row has alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.families.checkpoints import FAMILIES, Family, plan_for, write_additions
from tests.fuzz.exactness import fuzz
from verifier_svc.config import VerifierConfig
from verifier_svc.kernels.cpu.packed_layers import packed_layers
from verifier_svc.kernels.cpu.pair_products import PairProduct
from verifier_svc.model.loading import load_probed_target
from verifier_svc.model.precision import multiplies_bfloat16

# On a busy machine; a quiet one takes a tenth of it.
pytestmark = pytest.mark.timeout(600)


def gentle(name: str) -> Family:
    """A family with weights so small that rounded inputs hardly change its logits."""
    return replace(FAMILIES[name], settings={**FAMILIES[name].settings, "initializer_range": 0.1})


def config_of(name: str, directory: Path) -> VerifierConfig:
    gentle(name).write(directory)
    return VerifierConfig(model=str(directory), device="cpu", dtype="bfloat16", exactness="strict")


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3-moe"])
def test_a_crowd_gets_the_tokens_and_the_bits_that_each_gets_alone(name: str, tmp_path: Path) -> None:
    gentle(name).write(tmp_path)
    counts = fuzz(plan_for(gentle(name), tmp_path, tokens=300, changes=40, dtype="bfloat16"))
    assert counts["accepted"] > 50


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3-moe"])
def test_products_are_of_pairs_where_the_processor_has_them(name: str, tmp_path: Path) -> None:
    target, info = load_probed_target(config_of(name, tmp_path))
    layers = packed_layers(target.model)
    assert (info.dtype, info.exact) == ("bfloat16", True)
    assert layers
    assert {isinstance(layer.product, PairProduct) for layer in layers} == {multiplies_bfloat16()}


@pytest.mark.parametrize("name", ["lfm2", "mamba"])
def test_a_crowd_whose_nodes_are_pruned_gets_the_same(name: str, tmp_path: Path) -> None:
    """The head computes its scores in single precision, the output layer rounds its inputs."""
    FAMILIES[name].write(tmp_path / "model")
    head, _ = write_additions(tmp_path / "model", tmp_path)
    plan = plan_for(FAMILIES[name], tmp_path / "model", tokens=300, changes=40, dtype="bfloat16")
    assert fuzz(replace(plan, early_head=head))["accepted"] > 50


@pytest.mark.skipif(not multiplies_bfloat16(), reason="the processor does not multiply bfloat16")
@pytest.mark.parametrize("name", ["qwen3.5", "qwen3-moe"])
def test_products_that_give_other_logits_are_not_used(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    product = PairProduct.__call__
    monkeypatch.setattr(PairProduct, "__call__", lambda *inputs: product(*inputs) * 1.5)
    target, info = load_probed_target(config_of(name, tmp_path))
    assert info.exact
    assert not any(isinstance(layer.product, PairProduct) for layer in packed_layers(target.model))
