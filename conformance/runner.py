"""Running cases, one after the other, each with a limit of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from conformance.case import Case
from conformance.deployment import Deployment
from conformance.errors import DifferenceError, FailureError, SkippedError
from coppice.client import RequestFailedError
from coppice.v1.inference_pb2 import GenerateRequest

Status = Literal["passed", "failed", "skipped"]


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
        if isinstance(failure, DifferenceError) and not deployment.facts.is_strict:
            return "skipped", f"{failure.reason}, as fast mode allows at a near-tie", failure.request
        return "failed", failure.reason, failure.request
    except RequestFailedError as error:
        return "failed", str(error), None
    except TimeoutError:
        return "failed", f"not finished within {limit_s:g} s", None
    except Exception as error:  # noqa: BLE001 - an answer may be broken in ways that no case foresees
        return "failed", f"no sense can be made of an answer: {type(error).__name__}: {error}", None
    return "passed", "", None
