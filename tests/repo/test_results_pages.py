"""`docs/results/` is what `coppice bench report` makes of `results/`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from coppice.lab.bench.results_pages import write_pages

ROOT = Path(__file__).resolve().parents[2]


def test_the_committed_pages_are_those_that_the_command_writes(tmp_path: Path) -> None:
    committed = sorted(path for path in (ROOT / "docs" / "results").iterdir())
    # Pictures are committed with the pages alone.
    for path in committed:
        if path.suffix == ".png":
            shutil.copy(path, tmp_path)
    written = write_pages(ROOT / "results", tmp_path)
    assert [path.name for path in committed] == sorted(path.name for path in written)
    for path in committed:
        assert path.read_bytes() == (tmp_path / path.name).read_bytes(), path.name


def test_a_page_has_command_ratios_and_rows_and_an_old_page_goes(tmp_path: Path) -> None:
    rows = [{"name": "on", "tokens_per_s": 20.0, "runs": 3}, {"name": "off|a", "tokens_per_s": 10.0, "runs": 3}]
    report = {"command": "coppice bench x", "rows": rows, "ratios": {"on/off": 2.0}, "ratio_spread": {"on/off": [1, 3]}}
    results, out = tmp_path / "results" / "sub", tmp_path / "out"
    results.mkdir(parents=True)
    out.mkdir()
    for name in ("old.md", "old.png", "sub-x.png"):
        (out / name).write_bytes(b"old")
    for name in ("x", "y"):
        (results / f"{name}.json").write_text(json.dumps(report))
    (results / "y.png").write_bytes(b"drawn")
    write_pages(tmp_path / "results", out)
    assert sorted(path.name for path in out.iterdir()) == [
        "index.md", "sub-x.md", "sub-x.png", "sub-y.md", "sub-y.png",
    ]  # fmt: skip
    assert [(out / f"sub-{name}.png").read_bytes() for name in ("x", "y")] == [b"old", b"drawn"]
    assert "![sub/x.json](sub-x.png)" in (out / "sub-x.md").read_text()
    page = (out / "sub-x.md").read_text()
    for line in ("| command | `coppice bench x` |", "| `on/off` | 2 | 1 to 3 |", "| on | 20 |", "| off\\|a | 10 |"):
        assert line in page.splitlines()
    assert "The same in every row: runs 3." in page


def test_a_file_that_is_no_report_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(ValueError, match=r"x\.json"):
        write_pages(tmp_path, tmp_path / "out")
