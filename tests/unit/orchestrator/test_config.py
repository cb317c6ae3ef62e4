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


def test_several_verifiers_are_separated_by_commas() -> None:
    assert Config.from_env({"VERIFIER_ADDRESS": "v:1"}).verifier_addresses == ("v:1",)
    assert Config.from_env({"VERIFIER_ADDRESS": " v:1, w:2,"}).verifier_addresses == ("v:1", "w:2")


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
        "CACHE_DRAFTER": "on",
        "REDIS_URL": "redis://r:1",
        "REDIS_TIMEOUT_MS": "7",
        "CACHE_SECRET": " of all ",
        "CACHE_MIB": "8",
        "CACHE_TTL_S": "9",
        "MAX_QUEUED": "8",
        "MAX_QUEUE_WAIT_S": "0.5",
        "MAX_TOKEN_MS": "25",
        "TENANT_WEIGHTS": "a=2, b = 3",
        "PLANNER": "fixed",
        "METRICS_PORT": "9100",
        "TOKENS_FILE": "/tokens",
        "OPEN_REFLECTION": "true",
        "ROUNDS": "synchronous",
        "SYNCHRONOUS_WAIT_S": "3.5",
        "SHARED_PLACES": "5",
        "UNREAD_S": "2.5",
    }
    expected = Config(
        verifier_address="v:1",
        drafter_addresses=("a:1", "b:2"),
        listen_address="0.0.0.0:5",
        require_drafters=True,
        max_nodes=7,
        linger_ms=1.5,
        max_requests=3,
        default_timeout_s=4.0,
        connect_timeout_s=5.0,
        grace_s=0.0,
        resume_s=6.0,
        max_outputs=2,
        cache_drafter=True,
        redis_url="redis://r:1",
        redis_timeout_ms=7.0,
        cache_secret=" of all ",
        cache_mib=8,
        cache_ttl_s=9.0,
        max_queued=8,
        max_queue_wait_s=0.5,
        max_token_ms=25.0,
        tenant_weights=(("a", 2), ("b", 3)),
        planner="fixed",
        metrics_port=9100,
        tokens_file="/tokens",
        open_reflection=True,
        rounds="synchronous",
        synchronous_wait_s=3.5,
        shared_places=5,
        unread_s=2.5,
    )
    assert Config.from_env(env) == expected


def test_secrets_do_not_show() -> None:
    shown = repr(Config(verifier_address="v:1", redis_url="redis://:hidden@r:1", cache_secret="hidden"))
    assert "hidden" not in shown


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VERIFIER_ADDRESS", " "),
        ("VERIFIER_ADDRESS", ","),
        ("VERIFIER_ADDRESS", "v:1, v:1"),
        ("MAX_NODES", "many"),
        ("MAX_OUTPUTS", "0"),
        ("MAX_NODES", "-1"),
        ("LINGER_MS", "nan"),
        ("MAX_REQUESTS", "0"),
        ("MAX_QUEUED", "-1"),
        ("MAX_QUEUE_WAIT_S", "-1"),
        ("MAX_TOKEN_MS", "nan"),
        ("METRICS_PORT", "65536"),
        ("METRICS_PORT", "-1"),
        ("TENANT_WEIGHTS", "a=0"),
        ("TENANT_WEIGHTS", "a"),
        ("TENANT_WEIGHTS", "a=many"),
        ("REQUIRE_DRAFTERS", "perhaps"),
        ("DEFAULT_TIMEOUT_S", "0"),
        ("GRACE_S", "-1"),
        ("CACHE_DRAFTER", "perhaps"),
        ("REDIS_TIMEOUT_MS", "0"),
        ("CACHE_MIB", "0"),
        ("CACHE_TTL_S", "-1"),
        ("PLANNER", "clever"),
        ("HEALTH_PORT", "65536"),
        ("SHARED_PLACES", "-1"),
        ("UNREAD_S", "nan"),
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
