"""Prompts: files in both shapes, and cuts of held-out sources."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pytest

from coppice.checkpoints.bundled import MODELS
from coppice.core.tokenizer import TargetTokenizer, load_tokenizer_json
from coppice.lab.bench.prompts import (
    MAX_PROMPT_CHARS,
    Prompt,
    PromptsError,
    encoded_prompts,
    first_of_each_category,
    held_out_prompts,
    read_prompts,
)
from coppice.training.corpus import SourceFile, read_corpus, standard_library


def _held_out_name(start: int = 0) -> str:
    names = (f"module_{number}.py" for number in range(start, 10_000))
    return next(name for name in names if SourceFile(name, "").is_held_out)


def _source(num_lines: int) -> str:
    return "".join(f"    value_{number} = {number}\n" for number in range(num_lines))


def test_questions_are_taken_by_category_and_rendered_by_the_targets_template(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    records = [{"category": category, "turns": [f"{category} {at}"]} for at in range(3) for category in ("qa", "code")]
    path.write_text("\n".join(map(json.dumps, [*records, {"prompt": "plain"}])))
    chosen = first_of_each_category(read_prompts(path), 2)
    assert [prompt.text for prompt in chosen] == ["qa 0", "code 0", "qa 1", "code 1", "plain"]
    assert [prompt.is_question for prompt in chosen] == [True] * 4 + [False]
    # A copy of the bundled target's tokenizer, with a template.
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        if (MODELS / "target" / name).exists():
            shutil.copy(MODELS / "target" / name, tmp_path)
    tokenizer = TargetTokenizer(load_tokenizer_json(tmp_path))
    without, _ = encoded_prompts(tmp_path, chosen, 8, 256)
    assert without == [tokenizer.encode(prompt.text) for prompt in chosen]
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    rendered, _ = encoded_prompts(tmp_path, chosen, 8, 256)
    expected = [f"user: {prompt.text}\n" if prompt.is_question else prompt.text for prompt in chosen]
    assert rendered == [tokenizer.encode(text) for text in expected]


def test_prompt_lines_and_turns_are_read_and_blank_lines_skipped(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    records = [{"prompt": "one"}, {"question_id": 81, "turns": ["two", "not this"]}]
    path.write_text("\n\n".join(json.dumps(record) for record in records) + "\n")
    assert [prompt.text for prompt in read_prompts(path)] == ["one", "two"]


def test_a_gzipped_file_reads_like_a_plain_one(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl.gz"
    path.write_bytes(gzip.compress('{"prompt": "grün"}\n'.encode()))
    assert read_prompts(path) == [Prompt("grün", "prompts.jsonl.gz:1")]


@pytest.mark.parametrize(
    "line",
    ["{", "[]", "3", "{}", '{"prompt": ""}', '{"prompt": 3}', '{"turns": []}', '{"turns": [1]}', '{"turns": 1}'],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "good"}}\n{line}\n')
    with pytest.raises(PromptsError, match=r"prompts\.jsonl:2: "):
        read_prompts(path)


def test_the_standard_library_yields_twenty_prompts_from_held_out_places() -> None:
    files = read_corpus([standard_library()])
    prompts = held_out_prompts(20, seed=0)
    held_out = {file.name: file.text for file in files if file.is_held_out}
    assert len({prompt.origin for prompt in prompts}) == 20
    for prompt in prompts:
        text = held_out[prompt.origin.rpartition(":")[0]]
        assert prompt.text in text
        assert len(prompt.text) <= MAX_PROMPT_CHARS


def test_trained_on_files_are_never_cut() -> None:
    name = next(f"other_{n}.py" for n in range(100) if not SourceFile(f"other_{n}.py", "").is_held_out)
    with pytest.raises(PromptsError, match="no room for 1 prompts"):
        held_out_prompts(1, 0, [SourceFile(name, _source(1000))])
