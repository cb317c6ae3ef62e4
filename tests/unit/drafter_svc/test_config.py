"""The environment becomes a configuration, or a message that names the variable."""

from __future__ import annotations

import re
from typing import Any

import pytest

from coppice.core.errors import UnsupportedError
from coppice.net.tls import ServerTls
from coppice.settings import ConfigError
from drafter_svc.config import DrafterConfig
from drafter_svc.drafters import registry


def test_only_the_model_must_be_given() -> None:
    config = DrafterConfig.from_env({"MODEL": "some/dir", "THREADS": ""})
    assert config == DrafterConfig(model="some/dir")
    assert config.num_threads == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MODEL", ""),
        ("LISTEN_ADDRESS", "50051"),
        ("LISTEN_ADDRESS", "host:port"),
        ("LISTEN_ADDRESS", "host:70000"),
        ("DRAFTER_KIND", "crystal-ball"),
        ("DEVICE", "tpu"),
        ("THREADS", "many"),
    ],
)
def test_a_bad_value_is_refused_by_the_name_of_its_variable(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name} must be .*got '?{re.escape(value)}"):
        DrafterConfig.from_env({"MODEL": "m", name: value})


def test_an_unknown_kind_is_refused_with_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    config = DrafterConfig(model="m")
    monkeypatch.setattr(registry, "KINDS", {"semi-ar": "x", "diffusion": "y"})
    with pytest.raises(UnsupportedError, match=r"small-lm.*diffusion, semi-ar"):
        registry.load_drafter(config)


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
        DrafterConfig.from_env({"MODEL": "m", **env})


def test_tls_is_all_three_files_or_none() -> None:
    files = {"TLS_CERT": "c", "TLS_KEY": "k", "TLS_CLIENT_CA": "a"}
    assert DrafterConfig.from_env({"MODEL": "m", **files}).tls == ServerTls("c", "k", "a")
    assert DrafterConfig.from_env({"MODEL": "m"}).tls is None


@pytest.mark.parametrize(
    ("settings", "on_gpu", "steps"),
    [
        ({}, False, 4),
        ({"niceness": 5}, False, 0),
        ({"niceness": 5}, True, 4),
        ({"niceness": 5, "draft_ahead": "on", "draft_ahead_steps": 3}, False, 3),
        ({"draft_ahead": "off"}, True, 0),
    ],
)
def test_a_drafter_drafts_ahead_where_it_has_a_processor_of_its_own_or_is_told_to(
    settings: dict[str, Any], *, on_gpu: bool, steps: int
) -> None:
    assert DrafterConfig(model="model", **settings).ahead_steps(on_gpu=on_gpu) == steps
