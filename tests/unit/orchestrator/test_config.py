"""Configuration: read once, and a bad value names its variable."""

from __future__ import annotations

import subprocess
import sys

import pytest

from coppice.net.tls import ChannelTls, ServerTls
from coppice.settings import ConfigError
from orchestrator.config import Config


def test_defaults_need_only_a_verifier() -> None:
    config = Config.from_env({"VERIFIER_ADDRESS": "v:1"})
    assert config == Config(verifier_address="v:1")
    assert config.drafter_addresses == ()


def test_lists_are_separated_by_commas() -> None:
    env = {"VERIFIER_ADDRESS": " v:1, w:2,", "DRAFTER_ADDRESSES": "a:1, b:2,", "TENANT_WEIGHTS": "a=2, b = 3"}
    config = Config.from_env(env)
    assert config.verifier_addresses == ("v:1", "w:2")
    assert config.drafter_addresses == ("a:1", "b:2")
    assert config.tenant_weights == (("a", 2), ("b", 3))


def test_secrets_do_not_show() -> None:
    shown = repr(Config(verifier_address="v:1", redis_url="redis://:hidden@r:1", cache_secret="hidden"))
    assert "hidden" not in shown


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VERIFIER_ADDRESS", " "),
        ("VERIFIER_ADDRESS", ","),
        ("VERIFIER_ADDRESS", "v:1, v:1"),
        ("TENANT_WEIGHTS", "a=0"),
        ("TENANT_WEIGHTS", "a"),
        ("TENANT_WEIGHTS", "a=many"),
    ],
)
def test_a_bad_value_names_its_variable(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        Config.from_env({"VERIFIER_ADDRESS": "v:1", name: value})


@pytest.mark.parametrize(
    ("env", "complaint"),
    [
        ({"TLS_CERT": "c"}, "TLS_KEY must be set"),
        ({"TLS_KEY": "k"}, "TLS_CERT must be set"),
        ({"TLS_CLIENT_CA": "a"}, "TLS_CERT must be set"),
        ({"BACKEND_TLS_CA": "a"}, "BACKEND_TLS_CERT must be set"),
        ({"BACKEND_TLS_NAME": "n"}, "BACKEND_TLS_CA must be set"),
        ({"BACKEND_TLS_CERT": "c", "BACKEND_TLS_KEY": "k"}, "BACKEND_TLS_CA must be set"),
        ({"BACKEND_TLS_CA": "a", "BACKEND_TLS_CERT": "c"}, "BACKEND_TLS_KEY must be set"),
        ({"BACKEND_TLS_CA": "a", "BACKEND_TLS_KEY": "k"}, "BACKEND_TLS_CERT must be set"),
        ({"METRICS_TLS": "on"}, "METRICS_TLS=on needs TLS_CERT"),
        ({"METRICS_TLS": "mutual", "TLS_CERT": "c", "TLS_KEY": "k"}, "METRICS_TLS=mutual needs TLS_CLIENT_CA"),
        ({"METRICS_TLS": "true"}, "METRICS_TLS must be one of off, on, mutual"),
    ],
)
def test_half_of_tls_names_the_variable_that_is_missing(env: dict[str, str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=f"^{complaint}"):
        Config.from_env({"VERIFIER_ADDRESS": "v:1", **env})


def test_each_side_has_its_own_tls() -> None:
    config = Config.from_env({"VERIFIER_ADDRESS": "v:1", "TLS_CERT": "c", "TLS_KEY": "k"})
    assert (config.tls, config.backend_tls) == (ServerTls("c", "k"), None)
    names = {"BACKEND_TLS_CA": "a", "BACKEND_TLS_CERT": "c", "BACKEND_TLS_KEY": "k", "BACKEND_TLS_NAME": "n"}
    config = Config.from_env({"VERIFIER_ADDRESS": "v:1", **names})
    assert (config.tls, config.backend_tls) == (None, ChannelTls("a", "c", "k", "n"))


def test_a_redis_without_the_cache_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match="REDIS_URL needs CACHE_DRAFTER"):
        Config(verifier_address="v:1", cache_drafter=False, redis_url="redis://r:1")


def test_the_process_ends_with_code_2_and_the_name_of_the_variable() -> None:
    env = {"VERIFIER_ADDRESS": "127.0.0.1:1", "MAX_NODES": "x"}
    ended = subprocess.run(
        [sys.executable, "-m", "orchestrator"], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 2
    assert "MAX_NODES" in ended.stderr
    assert not ended.stdout
