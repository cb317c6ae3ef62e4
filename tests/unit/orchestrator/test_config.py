"""Configuration: read once, and a bad value names its variable."""

from __future__ import annotations

import subprocess
import sys

import pytest

from orchestrator.config import Config, ConfigError


def test_defaults_need_only_a_verifier() -> None:
    config = Config.from_env({"VERIFIER_ADDRESS": "v:1"})
    assert config == Config("v:1")
    assert config.drafter_addresses == ()


def test_every_variable_is_read() -> None:
    env = {
        "VERIFIER_ADDRESS": "v:1",
        "DRAFTER_ADDRESSES": "a:1, b:2,",
        "LISTEN_ADDRESS": "0.0.0.0:5",
        "REQUIRE_DRAFTERS": "true",
        "MAX_NODES": "7",
        "LINGER_MS": "1.5",
        "MAX_REQUESTS": "3",
        "DEFAULT_TIMEOUT_S": "4",
        "CONNECT_TIMEOUT_S": "5",
        "GRACE_S": "0",
        "RESUME_S": "6",
        "MAX_OUTPUTS": "2",
        "PLANNER": "fixed",
    }
    assert Config.from_env(env) == Config(
        "v:1", ("a:1", "b:2"), "0.0.0.0:5", True, 7, 1.5, 3, 4.0, 5.0, 0.0, 6.0, 2, "fixed"
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VERIFIER_ADDRESS", " "),
        ("MAX_NODES", "many"),
        ("MAX_OUTPUTS", "0"),
        ("MAX_NODES", "-1"),
        ("LINGER_MS", "nan"),
        ("MAX_REQUESTS", "0"),
        ("REQUIRE_DRAFTERS", "perhaps"),
        ("DEFAULT_TIMEOUT_S", "0"),
        ("GRACE_S", "-1"),
        ("PLANNER", "clever"),
    ],
)
def test_a_bad_value_names_its_variable(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        Config.from_env({"VERIFIER_ADDRESS": "v:1", name: value})


def test_the_process_ends_with_code_2_and_the_name_of_the_variable() -> None:
    env = {"VERIFIER_ADDRESS": "127.0.0.1:1", "MAX_NODES": "x"}
    ended = subprocess.run(
        [sys.executable, "-m", "orchestrator"], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 2
    assert "MAX_NODES" in ended.stderr
    assert not ended.stdout
