"""Running cases, one after the other, each with a limit of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from coppice.client import RequestFailedError
from coppice.lab.conformance.catalogue import Case
from coppice.lab.conformance.deployment import Deployment
from coppice.lab.conformance.errors import DifferenceError, FailureError, NearTieError, RoundingError, SkippedError
from coppice.v1.inference_pb2 import GenerateRequest

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
