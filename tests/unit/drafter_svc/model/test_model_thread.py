"""Jobs in order, idle work last, and a failure that stops nothing."""

from __future__ import annotations

import logging
import threading

import pytest

from drafter_svc.model.model_thread import ModelThread


def test_jobs_run_in_order_and_idle_work_waits_for_them() -> None:
    order: list[str] = []
    thread, done = ModelThread(), threading.Event()

    def first() -> None:
        thread.submit_idle(lambda: order.append("idle"))
        thread.submit_idle(done.set)
        order.append("first")

    thread.submit(first)
    thread.submit(lambda: order.append("second"))
    thread.submit(lambda: order.append("third"))
    thread.start()
    assert done.wait(10)
    thread.stop()
    assert order == ["first", "second", "third", "idle"]


def test_a_job_that_fails_is_logged_and_the_next_one_runs(caplog: pytest.LogCaptureFixture) -> None:
    thread, done = ModelThread(), threading.Event()

    def fail() -> None:
        raise ValueError("no")

    with caplog.at_level(logging.ERROR):
        thread.submit(fail)
        thread.submit(done.set)
        thread.start()
        assert done.wait(10)
        thread.stop()
    assert "a job of the model thread failed" in caplog.text
