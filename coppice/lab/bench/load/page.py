"""The result of a load as one HTML file for readers who do not run the service: it loads nothing from elsewhere."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from coppice.lab.bench.harness.tables import cell

Row = Mapping[str, Any]

# Policies by what they are to a reader: the service as it answers, and what it would do without speculation.
SERVED, PLAIN = "planner", "off"
STYLE = """
:root { color-scheme: light dark; --line: #8886; --good: #1a7f37; --bad: #c62828; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 1rem; }
th, td { border-bottom: 1px solid var(--line); padding: .3rem .6rem; text-align: right; }
th:first-child, td:first-child { text-align: left; }
.verdict { border-left: .4rem solid var(--good); padding: .5rem 1rem; font-size: 1.15rem; }
.verdict.bad { border-color: var(--bad); }
img { width: 100%; background: white; }
dt { font-weight: 600; } dd { margin: 0 0 .5rem; }
code { overflow-wrap: anywhere; }
"""
WORDS = {
    "Time to first token": "How long a user waits until the answer begins, from when the request was to be sent.",
    "Time per token": "How long each further token takes; a token is about three quarters of an English word.",
    "Typical, slowest 1 in 100": "Half of all requests are faster than the typical one; 99 of 100 are faster than the "
    "other figure.",
    "Within the targets": "Requests that were answered completely, with both times within what was promised "
    "(goodput under the service level objective).",
    "Without speculation": "The same service, on the same machine, in turn, with its guessing of tokens off.",
}


def load_page(report: Mapping[str, Any], picture: Path) -> str:
    """The page of a report of `coppice bench load`, with its PNG picture inside."""
    settings, machine = report["settings"], report["machine"]
    image = base64.b64encode(picture.read_bytes()).decode()
    facts = {
        "Machine": f"{machine['cpu']}, {machine['usable_cores']} cores, {cell(machine['memory_gib'])} GiB",
        "Model": settings["target"],
        "Requests": _requests(settings),
        "Command": report["command"],
        "Commit and day": f"{report['commit']}, {report['date']}",
    }
    parts = [
        "<h1>Load test</h1>",
        _verdict(report),
        f"<p>{escape(_headline(report))}</p>",
        _closed(report),
        _open(report),
        f'<h2>Pictures</h2><img alt="Speed, goodput and waits" src="data:image/png;base64,{image}">',
        _definitions("What the words mean", WORDS),
        _definitions("How it was measured", facts),
        _list("Remarks", report["notes"]),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'\">"
        f"<title>Load test of {escape(Path(settings['target']).name)}</title><style>{STYLE}</style></head><body>"
        + "\n".join(filter(None, parts))
        + "</body></html>\n"
    )


def _verdict(report: Mapping[str, Any]) -> str:
    checked, count = sum(row.get("num_compared", 0) for row in report["rows"]), len(report["mismatches"])
    if not count:
        return (
            f'<p class="verdict">Passed: none of {checked} answers differs from the model\'s own, and none failed.</p>'
        )
    return f'<p class="verdict bad">Failed in {count} ways.</p>' + _list("", report["mismatches"])


def _headline(report: Mapping[str, Any]) -> str:
    rows = [row for row in report["rows"] if row["part"] == "closed" and row["policy"] == SERVED]
    if not rows:
        return ""
    most = max(rows, key=lambda row: row["tokens_per_s"])
    ratio = report["ratios"].get(f"{SERVED}/{PLAIN}.{most['load']}")
    return (
        f"With {most['concurrency']} users at once the service gives {_number(most['tokens_per_s'])} tokens per second"
        + (f", {ratio:.2f} times as many as without speculation" if ratio else "")
        + f". The typical user then waits {_number(most['ttft_ms_p50'])} ms for an answer to begin."
    )


def _closed(report: Mapping[str, Any]) -> str:
    found = []
    for row in report["rows"]:
        if row["part"] == "closed" and row["policy"] == SERVED:
            ratio = report["ratios"].get(f"{SERVED}/{PLAIN}.{row['load']}")
            found.append(
                [
                    row["concurrency"],
                    _number(row["tokens_per_s"]),
                    _number(row["tokens_per_s"] / row["concurrency"]),
                    "-" if ratio is None else f"{ratio:.2f} times",
                    *(_number(row[name]) for name in ("ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50", "tpot_ms_p99")),
                ]
            )
    heads = "Users at once|Tokens/s, all|Tokens/s, each|Over without speculation|First token, typical (ms)"
    heads += "|First token, slowest 1 in 100 (ms)|Per token, typical (ms)|Per token, slowest 1 in 100 (ms)"
    return _table("So many users at once, each asks again when answered", heads.split("|"), found)


def _open(report: Mapping[str, Any]) -> str:
    settings = report["settings"]
    found = [
        [
            "as in the trace" if row["rate"] is None else f"{row['rate']:.0%} of capacity",
            "as served" if row["policy"] == SERVED else "without speculation",
            _number(row["offered_per_s"]),
            "-" if row["good_share"] is None else f"{row['good_share']:.0%}",
            _number(row["ttft_ms_p99"]),
            row["num_refused"],
            row["num_left"],
        ]
        for row in report["rows"]
        if row["part"] == "open" and row["policy"] in (SERVED, PLAIN)
    ]
    title = (
        f"Users who come whenever they like; targets: first token within {settings['ttft_target_ms']:g} ms, "
        f"{settings['tpot_target_ms']:g} ms per token"
    )
    heads = ("Load", "Service", "Arrivals/s", "Within the targets", "First token, slowest 1 in 100 (ms)", "Refused")
    return _table(title, (*heads, "Left by their user"), found)


def _requests(settings: Mapping[str, Any]) -> str:
    shortest, longest = settings["output_tokens"]
    text = f"over {settings['protocol']}, {settings['num_prompts']} prompts, answers of {shortest} to {longest} tokens"
    if settings["turns"] > 1:
        text += f", conversations of {settings['turns']} turns that begin alike"
    return text + (f", {settings['leaving']:.0%} left by their user before the end" if settings["leaving"] else "")


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(value))}</td>" for value in row) + "</tr>" for row in rows)
    return f"<h2>{escape(title)}</h2><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _definitions(title: str, entries: Mapping[str, Any]) -> str:
    lines = "".join(f"<dt>{escape(name)}</dt><dd>{escape(str(text))}</dd>" for name, text in entries.items())
    return f"<h2>{escape(title)}</h2><dl>{lines}</dl>"


def _list(title: str, texts: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return (f"<h2>{escape(title)}</h2>" if title and items else "") + (f"<ul>{items}</ul>" if items else "")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
