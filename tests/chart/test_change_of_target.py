"""Another target gives another revision, by which new orchestrators know new verifiers; nothing else does."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chart.rendering import PROFILES, Manifest, component, environment, of_kind, render, rendered, workloads


def revisions(manifests: list[Manifest]) -> dict[str, str | None]:
    """Of orchestrators and verifiers."""
    served = [one for one in workloads(manifests) if component(one) in ("orchestrator", "verifier")]
    return {component(one): environment(one).get("TARGET_REVISION") for one in served}


def revision(values: dict[str, Any]) -> str:
    found = revisions(render(values))
    assert found["verifier"] == found["orchestrator"]
    return found["verifier"] or ""


@pytest.mark.parametrize("profile", PROFILES)
def test_orchestrators_ask_for_the_revision_that_verifiers_have(profile: str) -> None:
    found = revisions(rendered(profile))
    assert found["verifier"]
    assert found["verifier"] == found["orchestrator"]


@pytest.mark.parametrize(
    "verifier",
    [
        {"config": {"MODEL": "/weights/another"}},
        {"config": {"DTYPE": "float32"}},
        {"config": {"QUANTIZATION": "int8"}},
        {"image": {"tag": "another"}},
        {"image": {"digest": "sha256:" + 64 * "0"}},
        {"weights": {"persistentVolumeClaim": {"claimName": "another"}}},
        {"extraEnv": [{"name": "HF_HOME", "value": "/weights/another"}]},
        {"extraVolumes": [{"name": "mine", "emptyDir": {}}]},
        # A longer context is another limit of requests.
        {"config": {"KV_CACHE_MIB": 2048}},
        {"targetRevision": "2"},
    ],
    ids=str,
)
def test_what_may_change_answers_changes_it(verifier: dict[str, Any]) -> None:
    assert revision({"verifier": verifier}) != revision({})


@pytest.mark.parametrize(
    "verifier",
    [{"replicas": 3}, {"resources": {}}, {"minReadySeconds": 5}, {"podLabels": {"team": "a"}}],
    ids=str,
)
def test_what_changes_no_answer_does_not(verifier: dict[str, Any]) -> None:
    assert revision({"verifier": verifier}) == revision({})


def test_a_revision_of_ones_own_does_not_hide_other_changes() -> None:
    own = {"targetRevision": "2"}
    assert revision({"verifier": own}) != revision({"verifier": {**own, "image": {"tag": "another"}}})


def test_a_new_replica_serves_a_while_before_the_next_old_one_stops() -> None:
    [verifier] = [one for one in of_kind(rendered("default"), "StatefulSet") if component(one) == "verifier"]
    assert verifier["spec"]["minReadySeconds"] == 60
