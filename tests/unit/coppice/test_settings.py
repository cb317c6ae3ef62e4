"""Declared settings: how they are read, and what is said of wrong ones."""

from __future__ import annotations

from typing import Annotated, Literal

import pytest
from pydantic import Field, ValidationError

from coppice.settings import LAB, VERBATIM, ConfigError, Rule, Seconds, Settings, allowed


class Example(Settings):
    name: str
    count: int = Field(default=3, ge=1, le=8)
    share: float = Field(default=0.5, ge=0, lt=1)
    wait_s: Seconds = Field(default=1.0, gt=0)
    least: int = Field(default=0, ge=0)
    mode: Literal["on", "off"] = "on"
    is_open: bool = False
    even: Annotated[int, Rule("even", lambda number: number % 2 == 0)] = 2
    secret: Annotated[str, VERBATIM] = ""
    trial: Annotated[int, LAB] = Field(default=1, ge=0)


def test_variables_are_read_by_their_names_in_capitals() -> None:
    env = {"NAME": " a ", "COUNT": "5", "IS_OPEN": "yes", "MODE": "off", "SECRET": " b ", "WAIT_S": "2", "UNKNOWN": "x"}
    expected = Example(name="a", count=5, is_open=True, mode="off", secret=" b ", wait_s=2.0)
    assert Example.from_env(env) == expected
    assert Example.from_env({"NAME": "a", "COUNT": "", "MODE": " ", "count": "5"}) == Example(name="a")


def test_the_constructor_reads_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COUNT", "5")
    assert Example(name="a").count == 3
    assert Example.from_env(name="a").count == 5


def test_a_prefix_goes_first_and_some_settings_count_with_it_alone() -> None:
    env = {"COUNT": "4", "LEAST": "7", "NAME": "of all", "OWN_COUNT": "5", "OWN_NAME": "own", "OWN_LEAST": ""}
    own = Example.from_env(env, prefix="OWN_")
    assert (own.name, own.count, own.least) == ("own", 5, 7)
    with pytest.raises(ConfigError, match="NAME must be"):
        Example.from_env({"NAME": "of all"}, prefix="OWN_", prefixed_only=["NAME"])
    assert Example.from_env(env, prefix="OWN_", count=6).count == 6


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({}, "NAME must be text, got ''"),
        ({"COUNT": "9"}, "COUNT must be a whole number in 1..8, got '9'"),
        ({"COUNT": "many"}, "COUNT must be a whole number in 1..8, got 'many'"),
        ({"COUNT": "1.5"}, "COUNT must be a whole number in 1..8, got '1.5'"),
        ({"LEAST": "-1"}, "LEAST must be a whole number of at least 0, got '-1'"),
        ({"SHARE": "1"}, "SHARE must be a number of at least 0 and below 1, got '1'"),
        ({"WAIT_S": "0"}, "WAIT_S must be a number above 0, got '0'"),
        ({"WAIT_S": "inf"}, "WAIT_S must be a number above 0, got 'inf'"),
        ({"WAIT_S": "nan"}, "WAIT_S must be a number above 0, got 'nan'"),
        ({"MODE": "maybe"}, "MODE must be one of on, off, got 'maybe'"),
        ({"IS_OPEN": "perhaps"}, "IS_OPEN must be true or false, got 'perhaps'"),
        ({"EVEN": "3"}, "EVEN must be even, got '3'"),
    ],
)
def test_a_wrong_value_is_refused_in_one_line(env: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Example.from_env({"NAME": "a", **env} if env else {})
    assert str(caught.value) == message


def test_a_setting_that_does_not_exist_is_a_mistake_in_code_alone() -> None:
    with pytest.raises(ConfigError, match="there is no setting COUNTS"):
        Example(name="a", counts=5)  # type: ignore[call-arg]


def test_what_is_for_measurements_is_read_from_one_variable() -> None:
    env = {"NAME": "a", "COPPICE_LAB": '{"trial": 2, "count": 5, "of_another_service": true}'}
    assert Example.from_env(env) == Example(name="a", trial=2)
    assert Example.from_env(env, prefix="OWN_").trial == 2
    assert Example.from_env({"NAME": "a", "TRIAL": "3"}).trial == 1
    for value in ("[1]", "{", "1"):
        with pytest.raises(ConfigError, match="COPPICE_LAB must be a JSON object, got"):
            Example.from_env({"NAME": "a", "COPPICE_LAB": value})
    with pytest.raises(ConfigError, match="TRIAL must be a whole number of at least 0, got -1"):
        Example.from_env({"NAME": "a", "COPPICE_LAB": '{"trial": -1}'})


def test_settings_do_not_change() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Example(name="a").count = 4  # type: ignore[misc]
    assert allowed(Example.model_fields["even"]) == "even"
