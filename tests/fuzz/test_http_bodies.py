"""Random bodies at the gateway: answers, or refusals of the client's."""

from __future__ import annotations

import logging

import pytest

from tests.fuzz.http_bodies import complaint, fuzz
from tests.http_client import Answered


async def test_random_bodies_are_answered_or_refused(caplog: pytest.LogCaptureFixture) -> None:
    statuses = await fuzz(300, seed=1)
    assert statuses.total() == 300
    assert statuses[200] > 10
    assert statuses[400] > 100
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR and record.exc_info]


def test_a_failure_of_ours_is_found() -> None:
    assert complaint(Answered(500, {}, b"{}")) == "status 500"
    assert complaint(Answered(400, {}, b'{"error": {"message": "x"}}')) == "another shape"
    assert complaint(Answered(200, {"content-type": "application/json"}, b"{}")) == "no answer"
