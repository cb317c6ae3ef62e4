"""The HTML file of a load's report: the committed result, and one that failed."""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from coppice.lab.bench.load.page import load_page

ROOT = Path(__file__).parents[6]
REPORT, PICTURE = ROOT / "results" / "load.json", ROOT / "docs" / "results" / "load.png"
MORE = {"protocol": "grpc", "turns": 1, "leaving": 0.0, "lognormal": False}


class Reader(HTMLParser):
    """Attributes that make a browser fetch something, open elements, and the text."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def page(**changed: Any) -> tuple[Reader, str]:
    report = json.loads(REPORT.read_text())
    report["settings"] |= MORE
    report["date"] = "2026-11-27"
    text = load_page({**report, **changed}, PICTURE)
    reader = Reader()
    reader.feed(text)
    assert not reader.open
    return reader, text


def test_it_loads_nothing_from_elsewhere() -> None:
    reader, text = page()
    [image] = reader.fetched
    assert image.startswith("data:image/png;base64,")
    assert base64.b64decode(image.partition(",")[2]) == PICTURE.read_bytes()
    assert not re.findall(r"url\(|@import|<script|<link|https?://", text.replace(image, ""))
    assert "default-src 'none'" in text


def test_it_says_what_the_rows_and_ratios_say() -> None:
    reader, _ = page()
    report = json.loads(REPORT.read_text())
    assert "Passed: none of" in reader.text
    most = max(
        (row for row in report["rows"] if row["part"] == "closed" and row["policy"] == "planner"),
        key=lambda row: row["tokens_per_s"],
    )
    assert (
        f"With {most['concurrency']} users at once the service gives {most['tokens_per_s']:,.0f} tokens" in reader.text
    )
    ratio = report["ratios"][f"planner/off.c{most['concurrency']}"]
    assert f"{ratio:.2f} times" in reader.text
    assert report["commit"] in reader.text


@pytest.mark.parametrize("text", ["planner c1: 1 of 3 outputs differ", "<script>alert(1)</script>"])
def test_a_run_that_failed_says_so_first(text: str) -> None:
    reader, html = page(mismatches=[text])
    assert "Passed" not in reader.text
    assert reader.text.index("Failed in 1 ways") < reader.text.index(text) < reader.text.index("Tokens/s")
    assert "<script" not in html
