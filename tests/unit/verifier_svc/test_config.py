"""Settings from the environment."""

from __future__ import annotations

import pytest

from coppice.net.tls import ServerTls
from verifier_svc.config import VerifierConfig


def test_unset_variables_keep_their_defaults() -> None:
    assert VerifierConfig.from_env({"MODEL": "m"}) == VerifierConfig(model="m")


def test_adapters_and_heads_need_a_target_that_one_process_holds() -> None:
    with pytest.raises(ValueError, match="TENSOR_PARALLEL must be 1"):
        VerifierConfig.from_env({"MODEL": "m", "SPACE_ADAPTER": "a", "TENSOR_PARALLEL": "2"})
    with pytest.raises(ValueError, match="EARLY_HEAD needs a target that one process holds"):
        VerifierConfig.from_env({"MODEL": "m", "EARLY_HEAD": "h", "TENSOR_PARALLEL": "2"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MODEL", ""),
        ("DEVICE", "tpu"),
    ],
)
def test_a_wrong_value_names_its_variable(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=name):
        VerifierConfig.from_env({"MODEL": "m", name: value})


@pytest.mark.parametrize(("name", "value"), [("REDRAFT_ROWS", "-4"), ("MAX_ROWS", "3"), ("NEAR_TIE_GAP", "NaN")])
def test_so_does_one_for_measurements(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=name):
        VerifierConfig.from_env({"MODEL": "m", "COPPICE_LAB": f'{{"{name.lower()}": {value}}}'})


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
