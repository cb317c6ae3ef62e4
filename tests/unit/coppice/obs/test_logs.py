"""Logs as people and machines read them."""

from __future__ import annotations

import contextvars
import json
import logging
from collections.abc import Iterator

import pytest

from coppice.core.errors import InvalidRequestError
from coppice.obs.logs import MOST_ALIKE, OURS, check_request_id, configure_logging, of_request, request_id

logger = logging.getLogger("coppice.test")


@pytest.fixture(autouse=True)
def loggers() -> Iterator[None]:
    """All loggers that are touched are as before when the test is over."""
    root = logging.getLogger()
    touched = [root, *map(logging.getLogger, [*OURS, "grpc._common", "library", "library.part"])]
    before, levels = list(root.handlers), [one.level for one in touched]
    yield
    root.handlers[:] = before
    for one, level in zip(touched, levels, strict=True):
        one.setLevel(level)


def configure(rank: int | None = None, **env: str) -> None:
    # What is replaced is closed, and these are pytest's.
    logging.getLogger().handlers.clear()
    configure_logging(env, rank)


def in_request(identity: str, *arguments: object) -> None:
    """Log as the task of a request would."""

    def log() -> None:
        request_id.set(identity)
        logger.info(*arguments)

    contextvars.copy_context().run(log)


def test_a_record_is_one_json_object_with_its_request(capsys: pytest.CaptureFixture[str]) -> None:
    configure(LOG_FORMAT="json")
    in_request("abc", "took %d ms", 5)
    logger.warning("no request")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert first.pop("time").endswith("Z")
    assert first == {"level": "INFO", "logger": "coppice.test", "message": "took 5 ms", "request_id": "abc"}
    assert "request_id" not in second


def test_a_record_says_itself_which_request_it_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    configure(LOG_FORMAT="json")
    logger.info("of another's task", extra=of_request("one"))
    contextvars.copy_context().run(lambda: (request_id.set("two"), logger.info("three", extra=of_request("three"))))
    assert [json.loads(line)["request_id"] for line in capsys.readouterr().err.splitlines()] == ["one", "three"]


@pytest.mark.parametrize("form", ["json", "text"])
def test_an_id_cannot_look_like_another_record(capsys: pytest.CaptureFixture[str], form: str) -> None:
    configure(LOG_FORMAT=form)
    in_request('x"\n2026-01-01 CRITICAL root: forged', "hello")
    [line] = capsys.readouterr().err.splitlines()
    assert "hello" in line


def test_an_exception_stays_within_its_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure(LOG_FORMAT="json")
    try:
        raise ValueError("why")
    except ValueError:
        logger.exception("failed")
    [line] = capsys.readouterr().err.splitlines()
    assert json.loads(line)["exception"].endswith("ValueError: why")


def test_text_is_the_default_and_levels_hold(capsys: pytest.CaptureFixture[str]) -> None:
    configure(LOG_LEVEL="warning")
    logger.info("quiet")
    in_request("abc", "quiet, too")
    logger.warning("loud")
    text = capsys.readouterr().err
    assert text.endswith("WARNING coppice.test: loud\n")
    assert "quiet" not in text


def test_libraries_say_warnings_alone_however_much_we_say(capsys: pytest.CaptureFixture[str]) -> None:
    configure(LOG_LEVEL="debug")
    library = logging.getLogger("library.part")
    logger.debug("ours")
    library.info("flood")
    library.warning("matters")
    assert [line.rpartition(": ")[2] for line in capsys.readouterr().err.splitlines()] == ["ours", "matters"]
    # Whoever computes a text for a record that nobody wants asks first.
    assert not library.isEnabledFor(logging.INFO)


def test_a_library_that_is_named_has_a_level_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    configure(LOG_LEVEL="warning, library = debug, library.part=ERROR")
    logger.info("quiet")
    logging.getLogger("library").debug("asked for")
    logging.getLogger("library.part").warning("not asked for")
    assert [line.rpartition(": ")[2] for line in capsys.readouterr().err.splitlines()] == ["asked for"]


def test_errors_alone_are_errors_of_libraries_too(capsys: pytest.CaptureFixture[str]) -> None:
    configure(LOG_LEVEL="error")
    logging.getLogger("library").warning("quiet")
    assert not capsys.readouterr().err


@pytest.mark.parametrize("form", ["json", "text"])
def test_a_process_that_follows_another_says_its_rank_and_less(capsys: pytest.CaptureFixture[str], form: str) -> None:
    configure(3, LOG_FORMAT=form)
    logger.info("as rank 0 says")
    logger.warning("lost")
    [line] = capsys.readouterr().err.splitlines()
    if form == "json":
        assert json.loads(line)["rank"] == 3
    else:
        assert " WARNING rank 3 coppice.test: lost" in line
    configure(3, LOG_FORMAT=form, LOG_LEVEL="DEBUG")
    logger.info("all of it")
    assert "all of it" in capsys.readouterr().err


@pytest.mark.parametrize(
    "value", ["numba=DEBUG", "INFO,numba", "INFO,=DEBUG", "INFO,numba=loud", "INFO,", "INFO,numba="]
)
def test_a_bad_level_of_a_library_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match=r"^LOG_LEVEL\b.* must be "):
        configure_logging({"LOG_LEVEL": value})


@pytest.mark.parametrize(("name", "value"), [("LOG_LEVEL", "chatty"), ("LOG_FORMAT", "xml")])
def test_a_bad_value_is_refused_by_the_name_of_its_variable(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be one of .*, got '{value}'"):
        configure_logging({name: value})


def test_ids_are_short() -> None:
    check_request_id("x" * 128)
    with pytest.raises(InvalidRequestError, match="request_id"):
        check_request_id("é" * 65)


def test_a_peer_that_sends_nonsense_gets_no_traceback_into_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    configure()
    logging.getLogger("grpc._common").error("Exception deserializing message!")
    assert capsys.readouterr().err == ""


def test_a_flood_of_records_is_cut_and_counted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(LOG_FORMAT="json")
    now_s = [1000.2]
    monkeypatch.setattr(logging.time, "time", lambda: now_s[0])  # type: ignore[attr-defined]
    monkeypatch.setattr(logging.time, "time_ns", lambda: int(now_s[0] * 1e9), raising=False)  # type: ignore[attr-defined]
    for number in range(50):
        logger.info("a stranger's number %d", number)
    logger.info("another kind")
    now_s[0] += 1.0
    logger.info("a stranger's number %d", 50)
    logger.info("a stranger's number %d", 51)
    told = [json.loads(line)["message"] for line in capsys.readouterr().err.splitlines()]
    assert told == [
        *(f"a stranger's number {number}" for number in range(MOST_ALIKE)),
        "another kind",
        f"a stranger's number 50 ({50 - MOST_ALIKE} more like it left out)",
        "a stranger's number 51",
    ]
