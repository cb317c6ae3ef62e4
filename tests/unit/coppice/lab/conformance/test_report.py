"""What is printed, for people and for programs."""

from __future__ import annotations

import json

from coppice.lab.conformance.report import Result, as_json, heading, result_lines, summary
from coppice.lab.conformance.requests import build
from coppice.v1.inference_pb2 import GetModelInfoResponse
from coppice.v1.sampling_pb2 import EXACTNESS_STRICT

INFO = GetModelInfoResponse(
    model="toy", version="1.2", sources=["small-lm"], exactness=EXACTNESS_STRICT, dtype="bfloat16"
)
RESULTS = [
    Result("a/good", "passed", 0.5),
    Result("a/bad", "failed", 1.0, "token 3 is 5, not 4", build("x", top_k=2)),
    Result("a/absent", "skipped", 0.0, "no drafter is connected"),
    Result("a/near", "explained", 0.0, "token 3 is 5, not 4: the answer counts 2 near-ties"),
]


def test_a_failure_has_its_reason_and_its_request_and_a_skip_its_reason() -> None:
    good, bad, absent, near = map(result_lines, RESULTS)
    assert good.split() == ["pass", "a/good", "0.50", "s"]
    assert bad.splitlines()[1:] == [
        "        token 3 is 5, not 4",
        '        request: {"prompt": "x", "sampling": {"top_k": 2}}',
    ]
    assert absent.endswith("no drafter is connected")
    assert near.splitlines()[1:] == ["        token 3 is 5, not 4: the answer counts 2 near-ties"]


def test_the_summary_counts_and_names_what_failed() -> None:
    assert summary(RESULTS) == "4 cases: 1 passed, 1 failed, 1 explained, 1 skipped, 2 s\nfailed: a/bad"
    assert "failed:" not in summary(RESULTS[:1])
    assert summary(RESULTS[:1], 7) == "1 cases: 1 passed, 0 failed, 0 explained, 0 skipped, 0 s, 7 preemptions"


def test_the_heading_says_what_is_tested() -> None:
    assert heading("host:1", INFO) == "host:1: model toy in bfloat16, version 1.2, strict mode, drafters: small-lm"


def test_the_object_has_the_counts_and_every_case() -> None:
    report = json.loads(json.dumps(as_json("host:1", INFO, RESULTS)))
    assert {
        key: report[key] for key in ("address", "model", "version", "dtype", "passed", "failed", "explained", "skipped")
    } == {
        "address": "host:1",
        "model": "toy",
        "version": "1.2",
        "dtype": "bfloat16",
        "passed": 1,
        "failed": 1,
        "explained": 1,
        "skipped": 1,
    }
    assert "preemptions" not in report
    assert as_json("host:1", INFO, RESULTS, 0)["preemptions"] == 0
    assert [set(case) for case in report["cases"]] == [{"name", "status", "seconds", "reason"}] * 4
    assert '"top_k": 2' in report["cases"][1]["reason"]
