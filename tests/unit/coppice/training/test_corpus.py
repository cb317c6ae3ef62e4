"""The corpus: a split that depends on the file's name alone, and held-out text that training never sees."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from coppice.core.errors import IncompatibleError
from coppice.training import corpus
from coppice.training.corpus import HELD_OUT_ONE_IN, SourceFile, corpus_digest, name_hash, read_corpus
from coppice.training.token_store import TokenStore
from coppice.training.tokenizer import train_tokenizer

# Two letters that occur nowhere else mark held-out text.
MARK = "Zq"


def write_tree(root: Path, count: int = 300) -> None:
    """Files of different content; those whose name falls into the held-out split carry the mark."""
    for index in range(count):
        name = f"pkg/module_{index}.py"
        mark = MARK if name_hash(name) % HELD_OUT_ONE_IN == 0 else "ordinary"
        text = f"def function_{index}(value):\n    return '{mark} {index}'\n" * 10
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def files(tmp_path: Path) -> list[SourceFile]:
    write_tree(tmp_path / "tree")
    return read_corpus([tmp_path / "tree"])


def test_the_hash_of_a_name_is_the_same_everywhere() -> None:
    assert name_hash("json/decoder.py") == 4264412640196777893
    assert SourceFile("json/decoder.py", "one").is_held_out == SourceFile("json/decoder.py", "two").is_held_out


def test_about_one_file_in_forty_is_held_out() -> None:
    held_out = sum(SourceFile(f"package/file_{index}.py", "").is_held_out for index in range(20_000))
    assert held_out == pytest.approx(20_000 / HELD_OUT_ONE_IN, rel=0.15)


def test_the_split_does_not_depend_on_where_or_with_what_a_file_lies(tmp_path: Path) -> None:
    write_tree(tmp_path / "one", count=100)
    write_tree(tmp_path / "two" / "deeper", count=50)
    many = {file.name: file.is_held_out for file in read_corpus([tmp_path / "one"])}
    few = {file.name: file.is_held_out for file in read_corpus([tmp_path / "two" / "deeper"])}
    assert few.items() <= many.items()


def test_a_corpus_has_a_digest_of_names_and_texts() -> None:
    files = [SourceFile("a.py", "one"), SourceFile("b.py", "two")]
    others = [
        files[:1],
        [SourceFile("a.py", "one"), SourceFile("b.py", "2")],
        [SourceFile("a.py", "one"), SourceFile("c.py", "two")],
    ]
    assert corpus_digest(files) == corpus_digest(list(files))
    assert len({corpus_digest(each) for each in (files, *others)}) == 4


def test_reading_twice_gives_the_same_files_in_the_same_order(tmp_path: Path) -> None:
    write_tree(tmp_path, count=40)
    assert read_corpus([tmp_path]) == read_corpus([tmp_path])


def test_a_copy_under_another_root_counts_once(tmp_path: Path) -> None:
    write_tree(tmp_path / "one", count=40)
    write_tree(tmp_path / "two", count=40)
    assert len(read_corpus([tmp_path / "one", tmp_path / "two"])) == 40


def test_tests_generated_code_and_tiny_files_are_left_out(tmp_path: Path) -> None:
    write_tree(tmp_path, count=1)
    for name in ("pkg/tests/test_a.py", "pkg/api_pb2.py", "pkg/__pycache__/b.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n" * 100)
    (tmp_path / "pkg/tiny.py").write_text("x = 1\n")
    assert [file.name for file in read_corpus([tmp_path])] == ["pkg/module_0.py"]


def test_a_file_that_is_not_utf_8_is_skipped_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_tree(tmp_path, count=2)
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9\n" * 100)
    with caplog.at_level(logging.WARNING):
        assert len(read_corpus([tmp_path])) == 2
    assert "latin.py" in caplog.text


def test_no_package_dominates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tree(tmp_path, count=40)
    everything = read_corpus([tmp_path])
    monkeypatch.setattr(corpus, "MAX_BYTES_PER_PACKAGE", sum(len(file.text) for file in everything) // 2)
    kept = read_corpus([tmp_path])
    assert 0.4 * len(everything) < len(kept) < 0.7 * len(everything)
    assert {file.name for file in everything if file.is_held_out} <= {file.name for file in kept}


def test_a_missing_or_empty_corpus_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist"):
        read_corpus([tmp_path / "absent"])
    with pytest.raises(FileNotFoundError, match="no usable Python source"):
        read_corpus([tmp_path])


@pytest.fixture
def store(files: list[SourceFile], tmp_path: Path) -> tuple[TokenStore, PreTrainedTokenizerFast]:
    train_tokenizer(files, tmp_path / "tokenizer", vocab_size=300)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "tokenizer")
    return TokenStore.build(files, tokenizer, tmp_path / "state"), tokenizer


def test_held_out_files_never_appear_in_training_batches(
    files: list[SourceFile], store: tuple[TokenStore, PreTrainedTokenizerFast]
) -> None:
    tokens, tokenizer = store
    assert any(MARK in file.text for file in files)
    assert MARK not in tokenizer.decode(tokens.train.tolist())
    assert MARK in tokenizer.decode(tokens.held_out.tolist())
    for step in range(20):
        for row in tokens.training_batch(seed=0, step=step, rows=4, length=64):
            assert MARK not in tokenizer.decode(row.tolist())


def test_the_tokenizer_is_trained_without_held_out_files(
    store: tuple[TokenStore, PreTrainedTokenizerFast],
) -> None:
    _, tokenizer = store
    assert len(tokenizer.encode(MARK)) == 2


def test_a_batch_is_a_function_of_seed_and_step(store: tuple[TokenStore, PreTrainedTokenizerFast]) -> None:
    tokens, _ = store
    batch = tokens.training_batch(seed=3, step=17, rows=4, length=32)
    assert batch.shape == (4, 32)
    assert batch.equal(tokens.training_batch(seed=3, step=17, rows=4, length=32))
    assert not batch.equal(tokens.training_batch(seed=3, step=18, rows=4, length=32))
    assert not batch.equal(tokens.training_batch(seed=4, step=17, rows=4, length=32))


def test_held_out_windows_are_the_same_every_time(store: tuple[TokenStore, PreTrainedTokenizerFast]) -> None:
    tokens, _ = store
    first, second = (tokens.held_out_batches(windows=6, rows=4, length=16) for _ in range(2))
    assert [len(batch) for batch in first] == [4, 2]
    assert all(one.equal(two) for one, two in zip(first, second, strict=True))


def test_a_corpus_of_one_split_alone_is_told(
    files: list[SourceFile], store: tuple[TokenStore, PreTrainedTokenizerFast], tmp_path: Path
) -> None:
    for is_held_out in (False, True):
        half = [file for file in files if file.is_held_out == is_held_out]
        with pytest.raises(IncompatibleError, match="the corpus is too small: of"):
            TokenStore.build(half, store[1], tmp_path / "half")


def test_too_little_text_for_a_row_is_told(store: tuple[TokenStore, PreTrainedTokenizerFast]) -> None:
    tokens, _ = store
    for split, text in (("training", tokens.train), ("held-out", tokens.held_out)):
        draw = {
            "training": lambda length: tokens.training_batch(seed=0, step=0, rows=2, length=length)[0],
            "held-out": lambda length: tokens.held_out_batches(windows=2, rows=2, length=length)[0][0],
        }[split]
        assert len(draw(len(text) - 1)) == len(text) - 1
        with pytest.raises(
            IncompatibleError, match=f"its {split} text has {len(text)} tokens, and a row is {len(text)}"
        ):
            draw(len(text))


def test_a_vocabulary_that_ids_do_not_fit_is_told(
    files: list[SourceFile], store: tuple[TokenStore, PreTrainedTokenizerFast], tmp_path: Path
) -> None:
    tokenizer = store[1]
    tokenizer.add_tokens([f"<{number}>" for number in range(2**16 - len(tokenizer))])
    TokenStore.build(files, tokenizer, tmp_path / "largest")
    tokenizer.add_tokens(["<one more>"])
    with pytest.raises(IncompatibleError, match="65537 tokens"):
        TokenStore.build(files, tokenizer, tmp_path / "larger")


def test_a_second_run_reads_the_cached_tokens(
    store: tuple[TokenStore, PreTrainedTokenizerFast], tmp_path: Path
) -> None:
    tokens, tokenizer = store
    again = TokenStore.build([], tokenizer, tmp_path / "state")
    assert np.array_equal(again.train, tokens.train)
    assert again.held_out_bytes_per_token == tokens.held_out_bytes_per_token > 1
