"""Which service of one process has which setting."""

from __future__ import annotations

import pytest

from coppice.colocated.config import ColocatedConfig

ENV = {"VERIFIER_MODEL": "target", "DRAFTERS": "small-lm=a,small-lm=b", "VERIFIERS": "2"}


def test_a_variable_is_for_all_who_know_it_and_a_prefix_makes_it_one_services() -> None:
    config = ColocatedConfig.from_env(
        {
            **ENV,
            "LISTEN_ADDRESS": "127.0.0.1:50050",
            "MAX_NODES": "9",
            "DRAFTER_MAX_NODES": "7",
            "KV_CACHE_MIB": "32",
            "METRICS_PORT": "9000",
            "COPPICE_LAB": '{"rounds": "synchronous"}',
        }
    )
    assert config.orchestrator.verifier_addresses == ("verifier-1", "verifier-2")
    assert config.orchestrator.drafter_addresses == ("drafter-1", "drafter-2")
    assert (config.orchestrator.max_nodes, config.orchestrator.metrics_port) == (9, 9000)
    assert config.orchestrator.is_synchronous
    assert [(one.model, one.max_nodes, one.metrics_port) for one in config.verifiers] == [
        ("target", 9, 9001),
        ("target", 9, 9002),
    ]
    assert {one.kv_cache_mib for one in config.verifiers} == {32}
    assert [(one.model, one.max_nodes, one.metrics_port) for one in config.drafters] == [("a", 7, 9003), ("b", 7, 9004)]
    assert {one.niceness for one in config.drafters} == {10}
    assert {one.listen_address for one in (*config.verifiers, *config.drafters)} == {"127.0.0.1:0"}


def test_without_drafters_there_are_none() -> None:
    config = ColocatedConfig.from_env({"VERIFIER_MODEL": "target"})
    assert (len(config.verifiers), config.drafters, config.orchestrator.drafter_addresses) == (1, (), ())


@pytest.mark.parametrize(
    ("setting", "value", "complaint"),
    [
        ("TENSOR_PARALLEL", "2", "TENSOR_PARALLEL must be 1"),
        ("VERIFIER_ADDRESS", "elsewhere:1", "VERIFIER_ADDRESS must not be set"),
        ("VERIFIERS", "0", "VERIFIERS must be a whole number of at least 1"),
        ("DRAFTERS", "small-lm", "KIND=MODEL"),
        ("COPPICE_LAB", '{"rounds": "often"}', "ROUNDS must be one of"),
        ("VERIFIER_MODEL", "", "MODEL must be a checkpoint directory"),
    ],
)
def test_what_one_process_does_not_do_is_refused_by_name(setting: str, value: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        ColocatedConfig.from_env({**ENV, setting: value})
