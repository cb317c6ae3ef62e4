"""Every family of models in a crowd, and the table of families in the documents.

`docs/families.md` has the table. With COPPICE_WRITE_TABLES=1 it is written anew.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from coppice.core.errors import IncompatibleError
from tests.families.checkpoints import EACH_RECURRENCE, FAMILIES, plan_for, row_of, write_additions
from tests.fuzz.exactness import MASKS, PRUNED, fuzz
from verifier_svc.config import VerifierConfig
from verifier_svc.model import loading

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "families.md"
HEAD = "| Family | Model | Layers | Exactness on a CPU |\n|---|---|---|---|\n"

# On a busy machine; a quiet one takes a tenth of it.
pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_crowd_gets_the_tokens_and_the_bits_that_each_gets_alone(name: str, tmp_path: Path) -> None:
    FAMILIES[name].write(tmp_path)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 500_000
    counts = fuzz(plan_for(FAMILIES[name], tmp_path, tokens=300, changes=40))
    assert counts["accepted"] > 50
    assert counts["blocks that came back"] == counts["blocks"]
    assert counts["tokens that transformers says, too"] > 50


@pytest.mark.parametrize("name", EACH_RECURRENCE)
def test_a_crowd_with_pruned_nodes_and_masks_gets_the_same(name: str, tmp_path: Path) -> None:
    """Recurrent layers before and after the head."""
    FAMILIES[name].write(tmp_path / "model")
    head, adapter = write_additions(tmp_path / "model", tmp_path)
    plan = plan_for(FAMILIES[name], tmp_path / "model", tokens=300, changes=40)
    counts = fuzz(replace(plan, early_head=head, space_adapter=adapter))
    assert counts["accepted"] > 50
    assert counts[PRUNED] > 50
    assert counts[MASKS] > 50
    assert counts["blocks that came back"] == counts["blocks"]


@pytest.mark.parametrize("name", ["lfm2", "qwen3.5"])
def test_passes_that_run_both_ways_leave_the_states_of_the_whole_one(name: str, tmp_path: Path) -> None:
    FAMILIES[name].write(tmp_path / "model")
    head, _ = write_additions(tmp_path / "model", tmp_path)
    plan = plan_for(FAMILIES[name], tmp_path / "model", tokens=300, changes=40)
    counts = fuzz(replace(plan, early_head=head, early_pruning="compare"))
    assert counts["accepted"] > 50
    assert counts[PRUNED] == 0


def test_the_table_of_families_is_what_loading_says(tmp_path: Path) -> None:
    rows = ""
    for name, family in FAMILIES.items():
        family.write(tmp_path / name)
        target, info = loading.load_probed_target(VerifierConfig(model=str(tmp_path / name), device="cpu"))
        rows += row_of(name, family, target, info)
    before, head, table = DOCUMENT.read_text().partition(HEAD)
    assert head
    if os.environ.get("COPPICE_WRITE_TABLES") == "1":
        DOCUMENT.write_text(before + head + rows)
        return
    assert table == rows


def test_without_packed_experts_a_mixture_is_not_strict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FAMILIES["mixtral"].write(tmp_path)
    monkeypatch.setattr(loading, "pack_experts", lambda *_: 0)
    with pytest.raises(IncompatibleError, match="different bits in a batch"):
        loading.load_probed_target(VerifierConfig(model=str(tmp_path), device="cpu", exactness="strict"))
