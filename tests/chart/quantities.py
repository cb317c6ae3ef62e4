"""What a query of PromQL gives: a count, a rate, seconds, bytes or a ratio, by the names of its metrics."""

from __future__ import annotations

import ast
import re
from typing import NamedTuple

# What Prometheus makes of a histogram.
_PARTS = re.compile(r"_(sum|count|bucket)$")
# Labels, durations, and what is summed by.
_NO_QUANTITY = re.compile(r"\{[^}]*\}|\[\w+\]|\bby \([^)]*\)")


class Powers(NamedTuple):
    """Of things that are counted, of seconds, and of bytes."""

    things: int = 0
    seconds: int = 0
    bytes: int = 0


NAMES = {
    Powers(things=1): "count",
    Powers(things=1, seconds=-1): "rate",
    Powers(seconds=1): "seconds",
    Powers(things=-1, seconds=1): "seconds",
    Powers(bytes=1): "bytes",
    Powers(): "ratio",
}


def family(name: str) -> str:
    """The metric that a series is of."""
    return _PARTS.sub("", name)


def is_counter(name: str) -> bool:
    """Whether a series only grows."""
    return name.endswith("_total") or family(name) != name


def quantity(query: str) -> str:
    """What a query gives.

    Raises:
        ValueError: it adds up what does not go together, or has no name here.
    """
    powers = _powers(ast.parse(_NO_QUANTITY.sub("", query), mode="eval").body)
    if powers not in NAMES:
        raise ValueError(f"{query} is of {powers}")
    return NAMES[powers]


def _powers(node: ast.expr) -> Powers:
    match node:
        case ast.Name(id=name):
            return _of_series(name)
        case ast.Constant():
            return Powers()
        case ast.Call(func=ast.Name(id="time"), args=[]):
            return Powers(seconds=1)
        case ast.Call(func=ast.Name(id="rate"), args=[ast.Name(id=name) as series]) if is_counter(name):
            things, seconds, size = _powers(series)
            return Powers(things, seconds - 1, size)
        case ast.Call(func=ast.Name(id="histogram_quantile"), args=[_, buckets]):
            # Buckets are counted; their bounds are what the name says.
            [name] = [each.id for each in ast.walk(buckets) if isinstance(each, ast.Name) and "_bucket" in each.id]
            return _of_series(family(name))
        case ast.Call(func=ast.Name(id="sum" | "min" | "max" | "avg"), args=[of]):
            return _powers(of)
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return Powers(*(over - under for over, under in zip(_powers(left), _powers(right), strict=True)))
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right) if _powers(left) == _powers(right):
            return _powers(left)
    raise ValueError(f"{ast.unparse(node)} is of no quantity")


def _of_series(name: str) -> Powers:
    if name.endswith(("_count", "_bucket")) and family(name) != name:
        return Powers(things=1)
    stem = family(name).removesuffix("_total")
    return Powers(seconds=1) if stem.endswith("_seconds") else Powers(bytes=1) if stem.endswith("_bytes") else Powers(1)
