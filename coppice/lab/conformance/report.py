"""Cases, run one after the other with a limit for each, and their results for people and for programs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from coppice.client import RequestFailedError
from coppice.lab.conformance.catalogue import Case
from coppice.lab.conformance.deployment import Deployment, is_strict
from coppice.lab.conformance.errors import DifferenceError, FailureError, NearTieError, RoundingError, SkippedError
from coppice.lab.conformance.requests import described
from coppice.v1.inference_pb2 import GenerateRequest, GetModelInfoResponse

# Explained: the case found a difference that fast mode allows, and the answer counts the near-ties that it takes; or
# one from the reference, which itself is as good as undecided there.
Status = Literal["passed", "failed", "explained", "skipped"]


@dataclass(frozen=True)
class Result:
    """How a case ended; a reason unless it passed, and the request that shows it where there is one."""

    name: str
    status: Status
    seconds: float
    reason: str = ""
    request: GenerateRequest | None = None


async def run_cases(
    cases: Sequence[Case], deployment: Deployment, limit_s: float, report: Callable[[Result], None]
) -> list[Result]:
    """Run cases in their order; each is reported as it ends."""
    results = []
    for case in cases:
        results.append(await run_case(case, deployment, limit_s))
        report(results[-1])
    return results


async def run_case(case: Case, deployment: Deployment, limit_s: float) -> Result:
    """Run one case; it fails when it has not ended within `limit_s`."""
    started_s = time.monotonic()
    status, reason, request = await _outcome(case, deployment, limit_s)
    return Result(case.name, status, time.monotonic() - started_s, " ".join(reason.split()), request)


async def _outcome(case: Case, deployment: Deployment, limit_s: float) -> tuple[Status, str, GenerateRequest | None]:
    try:
        async with asyncio.timeout(limit_s):
            await case.check(deployment)
    except SkippedError as skip:
        return "skipped", str(skip), None
    except FailureError as failure:
        return _judged(failure, deployment.is_strict)
    except RequestFailedError as error:
        return "failed", str(error), None
    except TimeoutError:
        return "failed", f"not finished within {limit_s:g} s", None
    except Exception as error:  # noqa: BLE001 - an answer may be broken in ways that no case foresees
        return "failed", f"no sense can be made of an answer: {type(error).__name__}: {error}", None
    return "passed", "", None


def _judged(failure: FailureError, is_strict: bool) -> tuple[Status, str, GenerateRequest | None]:
    """What a broken promise is worth: some are not made in fast mode."""
    if isinstance(failure, NearTieError):
        return "explained", failure.reason, failure.request
    if not is_strict and isinstance(failure, RoundingError):
        return "skipped", f"{failure.reason}: fast mode does not promise bits", failure.request
    if not is_strict and isinstance(failure, DifferenceError):
        if failure.near_ties:
            return "explained", f"{failure.reason}: the answer counts {failure.near_ties} near-ties", failure.request
        return "failed", f"{failure.reason}, and the answer counts no near-tie", failure.request
    return "failed", failure.reason, failure.request


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
