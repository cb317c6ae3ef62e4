"""Targets in every format that they come in have the tokens of the model that is in the checkpoint.

`docs/families.md` has a table of them. With COPPICE_WRITE_TABLES=1 it is written anew.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from coppice.checkpoints.catalogue import CACHE_VARIABLE
from coppice.core.tokenizer import TargetTokenizer
from tests.families.checkpoints import VOCAB
from tests.families.formats import FORMATS, is_tied, stored_in
from tests.families.test_families import DOCUMENT
from tests.unit.verifier_svc.model.test_precision import greedy, verified
from verifier_svc.config import VerifierConfig
from verifier_svc.model.loading import load_probed_target

HEAD = "| Format | What is loaded | Vocabulary | Embeddings | Exactness on a CPU |\n|---|---|---|---|---|\n"
END = "\n## Table\n"
PROMPT = [5, 9, 17]
TOKENS = 48
# Rounding in single precision, of two logits.
NEAR_TIE_GAP = 1e-3

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def rows() -> dict[str, str]:
    """Rows of the table, by format."""
    return {}


@pytest.mark.parametrize("name", FORMATS)
def test_a_target_has_the_tokens_of_the_model_in_its_checkpoint(
    name: str, rows: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    written = FORMATS[name](tmp_path)
    config = VerifierConfig(model=str(written.directory), device="cpu", threads=1, kv_cache_mib=4, dtype="float32")
    target, info = load_probed_target(config)
    tokens = list(PROMPT)
    for token in greedy(target, PROMPT, TOKENS):
        with torch.inference_mode():
            logits = written.expected(torch.tensor([tokens])).logits[0, -1]
        assert logits.max() - logits[token] <= NEAR_TIE_GAP
        tokens.append(token)
    assert len(set(tokens)) > 5, "a text that loops would hide much"
    assert verified(target, PROMPT, tokens[len(PROMPT) :]) == tokens[len(PROMPT) :], "speculation changes no token"
    embeddings = "tied" if is_tied(written.directory) else "untied"
    exactness = "strict" if info.exact else "fast"
    rows[name] = f"| {name} | {stored_in(written.directory)} | {info.vocab_size:,} | {embeddings} | {exactness} |\n"


def test_the_table_of_formats_is_what_was_loaded(rows: dict[str, str]) -> None:
    if rows.keys() != FORMATS.keys():
        pytest.skip("needs the test of every format to run before")
    before, head, rest = DOCUMENT.read_text().partition(HEAD)
    table, end, after = rest.partition(END)
    assert head
    assert end
    if os.environ.get("COPPICE_WRITE_TABLES") == "1":
        DOCUMENT.write_text(before + head + "".join(rows.values()) + end + after)
        return
    assert table == "".join(rows.values())


def test_a_token_of_the_padding_has_no_text(tmp_path: Path) -> None:
    """It can be drawn where the model gives it a high score, and ends nothing."""
    written = FORMATS["padded vocabulary"](tmp_path)
    tokenizer = TargetTokenizer((written.directory / "tokenizer.json").read_bytes())
    detokenizer = tokenizer.detokenizer()
    assert [detokenizer.push([token]) for token in (5, VOCAB + 7, 9)] == [chr(33 + 5), "", chr(33 + 9)]
    assert tokenizer.token_bytes(VOCAB + 7) == b""
