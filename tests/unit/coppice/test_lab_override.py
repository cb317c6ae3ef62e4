"""Settings that only benchmarks have reach services in one variable."""

from __future__ import annotations

import json

import pytest

from coppice.cli.topology import lab_moved
from drafter_svc.config import DrafterConfig
from orchestrator.config import Config
from verifier_svc.config import VerifierConfig


def test_a_topology_passes_them_on_in_one_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COPPICE_LAB", '{"planner": "fixed", "rounds": "asynchronous"}')
    env = lab_moved({"ROUNDS": "synchronous", "DRAFT_CHILDREN": "1", "EARLY_PRUNING": "compare", "MAX_NODES": "9"})
    overrides = {"planner": "fixed", "rounds": "synchronous", "draft_children": "1", "early_pruning": "compare"}
    assert json.loads(env.pop("COPPICE_LAB")) == overrides
    assert env == {"MAX_NODES": "9"}

    env["COPPICE_LAB"] = json.dumps(overrides)
    orchestrator = Config.from_env({**env, "VERIFIER_ADDRESS": "v:1"})
    assert (orchestrator.rounds, orchestrator.planner, orchestrator.max_nodes) == ("synchronous", "fixed", 9)
    assert DrafterConfig.from_env({**env, "MODEL": "m"}).draft_children == 1
    assert VerifierConfig.from_env({**env, "MODEL": "m"}).early_pruning == "compare"


def test_without_such_settings_the_environment_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COPPICE_LAB", '{"planner": "fixed"}')
    assert lab_moved({"MAX_NODES": "9"}) == {"MAX_NODES": "9"}
