"""Results for people, line by line, and for programs, as one object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coppice.lab.conformance.deployment import is_strict
from coppice.lab.conformance.requests import described
from coppice.lab.conformance.runner import Result
from coppice.v1.inference_pb2 import GetModelInfoResponse

_WORDS = {"passed": "pass", "failed": "FAIL", "explained": "near", "skipped": "skip"}
_NAME_WIDTH = 56


def heading(address: str, info: GetModelInfoResponse) -> str:
    mode = "strict" if is_strict(info) else "fast"
    drafters = ", ".join(info.sources) or "none"
    numbers = ", ".join(name for name in (info.dtype, info.quantization) if name not in ("", "none"))
    model = f"model {info.model} in {numbers or 'numbers unknown'}"
    return f"{address}: {model}, version {info.version}, {mode} mode, drafters: {drafters}"


def result_lines(result: Result) -> str:
    """One line; a failure, and a difference that is explained, has its reason and the request that shows it below."""
    line = f"  {_WORDS[result.status]}  {result.name:<{_NAME_WIDTH}} {result.seconds:6.2f} s"
    if result.status == "skipped":
        return f"{line}  {result.reason}"
    if result.status in ("failed", "explained"):
        request = f"\n        request: {described(result.request)}" if result.request is not None else ""
        return f"{line}\n        {result.reason}{request}"
    return line


def summary(results: Sequence[Result], num_preemptions: int | None = None) -> str:
    """The counts, that of preemptions where that is known, and the names of what failed."""
    counts = ", ".join(f"{count(results, status)} {status}" for status in _WORDS)
    text = f"{len(results)} cases: {counts}, {sum(result.seconds for result in results):.0f} s"
    if num_preemptions is not None:
        text += f", {num_preemptions} preemptions"
    failed = [result.name for result in results if result.status == "failed"]
    return f"{text}\nfailed: {', '.join(failed)}" if failed else text


def count(results: Sequence[Result], status: str) -> int:
    return sum(result.status == status for result in results)


def as_json(
    address: str, info: GetModelInfoResponse, results: Sequence[Result], num_preemptions: int | None = None
) -> dict[str, Any]:
    """The object that `coppice conformance --json` prints; it counts preemptions where that is known."""
    return {
        "address": address,
        "model": info.model,
        "version": info.version,
        "dtype": info.dtype,
        "serving_fingerprint": info.serving_fingerprint,
        **{status: count(results, status) for status in _WORDS},
        **({} if num_preemptions is None else {"preemptions": num_preemptions}),
        "cases": [
            {
                "name": result.name,
                "status": result.status,
                "seconds": round(result.seconds, 3),
                "reason": _reason(result),
            }
            for result in results
        ],
    }


def _reason(result: Result) -> str:
    if result.request is None:
        return result.reason
    return f"{result.reason}; request: {described(result.request)}"
