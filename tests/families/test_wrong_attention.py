"""Attention without a family's chunks, scales by position or biases is refused while loading."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from coppice.core.errors import IncompatibleError
from tests.families.checkpoints import FAMILIES
from verifier_svc.config import VerifierConfig
from verifier_svc.kernels.base import AttentionRule
from verifier_svc.layers.attention_traits import AttentionTraits
from verifier_svc.model import target_model
from verifier_svc.model.loading import load_probed_target
from verifier_svc.model.tree_attention import TreeAttention

# The first test compiles.
pytestmark = pytest.mark.timeout(600)


def without_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    original = target_model.attention_traits
    monkeypatch.setattr(
        target_model,
        "attention_traits",
        lambda model: {layer: replace(traits, chunk=None) for layer, traits in original(model).items()},
    )


def without_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AttentionTraits, "scaled", lambda _traits, query, _positions: query)


def with_half_the_biases(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = TreeAttention.attend

    def halved(attention: TreeAttention, *inputs: object) -> Tensor:
        *others, rule = inputs
        assert isinstance(rule, AttentionRule)
        assert rule.slopes is not None
        return attend(attention, *others, replace(rule, slopes=rule.slopes / 2))  # type: ignore[arg-type]

    monkeypatch.setattr(TreeAttention, "attend", halved)


@pytest.mark.parametrize(
    ("family", "inject"),
    [
        ("llama-4", without_chunks),
        ("llama-4", without_scales),
        ("bloom", with_half_the_biases),
        ("mpt", with_half_the_biases),
        ("falcon-alibi", with_half_the_biases),
    ],
    ids=lambda one: getattr(one, "__name__", one),
)
def test_it_is_refused(
    family: str, inject: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FAMILIES[family].write(tmp_path)
    inject(monkeypatch)
    with pytest.raises(IncompatibleError, match="other logits"):
        load_probed_target(VerifierConfig(model=str(tmp_path), device="cpu"))
