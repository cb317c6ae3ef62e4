"""A run that is killed while it writes a file goes on as if it had not begun to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from coppice.checkpoints.writing import whole_file
from coppice.training.corpus import SourceFile
from coppice.training.target_samples import SampleShape, sample_target
from coppice.training.teacher import teach
from coppice.training.token_store import TokenStore
from coppice.training.tokenizer import train_tokenizer
from tests.tiny_checkpoint import ONE_LAYER, tiny_llama

VOCAB = 50


class KilledError(Exception):
    """Stands for whatever kills a run."""


def half_written(file: Any, *arrays: Any, **named: Any) -> None:
    """What `np.save` and `np.savez` have done when the run is killed."""
    with file.open("wb") if isinstance(file, Path) else file as opened:
        opened.write(b"PK\x03\x04 and no more")
    raise KilledError


def sample(directory: Path) -> Any:
    corpus = np.random.default_rng(0).integers(0, VOCAB, 100).astype(np.uint16)
    target = tiny_llama(vocab_size=VOCAB, max_context_tokens=64, **ONE_LAYER)
    return sample_target(target, corpus, SampleShape(4, 2, 5, 7), seed=3, cache=directory)


def teach_rows(directory: Path) -> Any:
    target = tiny_llama(vocab_size=VOCAB, max_context_tokens=64, **ONE_LAYER)
    taught = teach(target, torch.arange(24).reshape(2, 12), directory)
    return torch.cat([taught.top_ids.float(), taught.top_log_probs.float()], -1).numpy()


def tokenize(directory: Path) -> Any:
    files = [SourceFile(f"module_{number}.py", f"x = {number}\n" * 100) for number in range(100)]
    train_tokenizer(files, directory / "tokenizer", vocab_size=300)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory / "tokenizer")
    return TokenStore.build(files, tokenizer, directory).train


@pytest.mark.parametrize(
    ("work", "writer"),
    [(sample, "save"), (teach_rows, "savez"), (tokenize, "savez")],
    ids=["samples", "taught", "tokens"],
)
def test_a_run_that_is_killed_while_it_writes_goes_on(
    work: Callable[[Path], Any], writer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, writer, half_written)
        with pytest.raises(KilledError):
            work(tmp_path / "killed")
    assert np.array_equal(work(tmp_path / "killed"), work(tmp_path / "whole"))


def test_a_file_that_is_there_stays_until_another_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "tokens.npz"

    def write(content: bytes, *, is_killed: bool = False) -> None:
        with whole_file(path) as file:
            file.write(content)
            if is_killed:
                raise KilledError

    write(b"first")
    with pytest.raises(KilledError):
        write(b"sec", is_killed=True)
    assert path.read_bytes() == b"first"
    write(b"second")
    assert path.read_bytes() == b"second"
