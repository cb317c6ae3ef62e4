"""Settings from the environment."""

from __future__ import annotations

import pytest

from coppice.net.tls import ServerTls
from verifier_svc.config import VerifierConfig


def test_unset_variables_keep_their_defaults() -> None:
    assert VerifierConfig.from_env({"MODEL": "m"}) == VerifierConfig(model="m")


def test_every_setting_is_read() -> None:
    env = {
        "MODEL": "m",
        "LISTEN_ADDRESS": "127.0.0.1:7",
        "DEVICE": "cpu",
        "THREADS": "3",
        "EXACTNESS": "fast",
        "MAX_NODES": "9",
        "MAX_CONTEXT_TOKENS": "100",
        "MAX_SEQUENCES": "2",
        "MAX_QUEUED": "5",
        "PREFILL_CHUNK": "64",
        "MAX_ROWS": "96",
        "KV_CACHE_MIB": "12",
        "PREFIX_REUSE": "off",
        "GRACE_S": "1.5",
        "TENSOR_PARALLEL": "2",
        "COLLECTIVE_TIMEOUT_S": "7.5",
        "NEAR_TIE_GAP": "0.01",
        "METRICS_PORT": "9100",
    }
    expected = VerifierConfig(
        model="m",
        listen_address="127.0.0.1:7",
        device="cpu",
        threads=3,
        exactness="fast",
        max_nodes=9,
        max_context_tokens=100,
        max_sequences=2,
        max_queued=5,
        prefill_chunk=64,
        max_rows=96,
        kv_cache_mib=12,
        prefix_reuse="off",
        grace_s=1.5,
        tensor_parallel=2,
        collective_timeout_s=7.5,
        near_tie_gap=0.01,
        metrics_port=9100,
    )
    assert VerifierConfig.from_env(env) == expected


def test_settings_of_re_drafts_are_read() -> None:
    env = {
        "MODEL": "m",
        "SPACE_ADAPTER": "a",
        "REDRAFT_TOKENS": "4",
        "REDRAFT_GROUPS": "2",
        "REDRAFT_NODES": "9",
        "REDRAFT_ROWS": "24",
        "REDRAFT_MIN_PROBABILITY": "0.05",
    }
    expected = VerifierConfig(
        model="m",
        space_adapter="a",
        redraft_tokens=4,
        redraft_groups=2,
        redraft_nodes=9,
        redraft_rows=24,
        redraft_min_probability=0.05,
    )
    assert VerifierConfig.from_env(env) == expected
    with pytest.raises(ValueError, match="TENSOR_PARALLEL must be 1"):
        VerifierConfig.from_env({**env, "TENSOR_PARALLEL": "2"})


def test_settings_of_early_pruning_are_read() -> None:
    env = {"MODEL": "m", "EARLY_HEAD": "h", "EARLY_PRUNING": "on"}
    assert VerifierConfig.from_env(env) == VerifierConfig(model="m", early_head="h", early_pruning="on")
    assert VerifierConfig(model="m").early_pruning == "auto"
    with pytest.raises(ValueError, match="EARLY_HEAD needs a target that one process holds"):
        VerifierConfig.from_env({**env, "TENSOR_PARALLEL": "2"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MODEL", ""),
        ("EARLY_PRUNING", "perhaps"),
        ("REDRAFT_TOKENS", "-1"),
        ("REDRAFT_GROUPS", "0"),
        ("REDRAFT_NODES", "0"),
        ("REDRAFT_ROWS", "-4"),
        ("REDRAFT_MIN_PROBABILITY", "nan"),
        ("REDRAFT_MIN_PROBABILITY", "1.5"),
        ("DEVICE", "tpu"),
        ("THREADS", "-1"),
        ("THREADS", "many"),
        ("EXACTNESS", "roughly"),
        ("MAX_NODES", "0"),
        ("MAX_SEQUENCES", "1.5"),
        ("KV_CACHE_MIB", "0"),
        ("MAX_ROWS", "3"),
        ("MAX_ROWS", "-8"),
        ("PREFIX_REUSE", "maybe"),
        ("GRACE_S", "-2"),
        ("TENSOR_PARALLEL", "0"),
        ("COLLECTIVE_TIMEOUT_S", "0"),
        ("NEAR_TIE_GAP", "-1e-4"),
        ("NEAR_TIE_GAP", "nan"),
        ("METRICS_PORT", "-1"),
        ("METRICS_PORT", "65536"),
    ],
)
def test_a_wrong_value_names_its_variable(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=name):
        VerifierConfig.from_env({"MODEL": "m", name: value})


@pytest.mark.parametrize(
    ("env", "complaint"),
    [
        ({"TLS_CERT": "c", "TLS_KEY": "k"}, "TLS_CLIENT_CA must be set"),
        ({"TLS_KEY": "k", "TLS_CLIENT_CA": "a"}, "TLS_CERT must be set"),
        ({"TLS_CERT": "c", "TLS_CLIENT_CA": "a"}, "TLS_KEY must be set"),
        ({"HEALTH_PORT": "65536"}, "HEALTH_PORT must be"),
        ({"HEALTH_PORT": "-1"}, "HEALTH_PORT must be"),
        ({"METRICS_TLS": "on"}, "METRICS_TLS=on needs TLS_CERT"),
        ({"METRICS_TLS": "https"}, "METRICS_TLS must be one of off, on, mutual"),
    ],
)
def test_tls_without_knowing_the_callers_is_refused(env: dict[str, str], complaint: str) -> None:
    with pytest.raises(ValueError, match=f"^{complaint}"):
        VerifierConfig.from_env({"MODEL": "m", **env})


def test_tls_is_all_three_files_or_none() -> None:
    files = {"TLS_CERT": "c", "TLS_KEY": "k", "TLS_CLIENT_CA": "a"}
    assert VerifierConfig.from_env({"MODEL": "m", **files}).tls == ServerTls("c", "k", "a")
    assert VerifierConfig.from_env({"MODEL": "m"}).tls is None
