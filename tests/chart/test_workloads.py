"""What the chart runs: restricted, probed where it listens, and given the time to finish."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from coppice.net.rpc import LIVENESS
from coppice.v1 import drafter_pb2, inference_pb2, verifier_pb2
from tests.chart.rendering import (
    ONE_MODEL,
    PROFILES,
    component,
    container,
    environment,
    grpc_services,
    name_of,
    of_kind,
    pods,
    rendered,
    selects,
    services_of_ours,
    workloads,
)

HEALTH_NAMES = {
    "orchestrator": inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name,
    "verifier": verifier_pb2.DESCRIPTOR.services_by_name["VerifierService"].full_name,
    "drafter": drafter_pb2.DESCRIPTOR.services_by_name["DrafterService"].full_name,
}
# Written to at run time, by the image's environment or by the system.
WRITABLE = {"/tmp", "/dev/shm", "/data"}

every_profile = pytest.mark.parametrize("profile", PROFILES)


def containers(profile: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, _, spec in pods(rendered(profile)):
        for one in [*spec.get("initContainers", []), *spec["containers"]]:
            yield name, one


@every_profile
def test_nothing_runs_as_root_or_can_become_it(profile: str) -> None:
    for name, _, spec in pods(rendered(profile)):
        context = spec["securityContext"]
        assert context["runAsNonRoot"] is True, name
        assert context["runAsUser"] > 0, name
        assert context["runAsGroup"] > 0, name
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys(), name
    for name, one in containers(profile):
        assert one["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }, name


@every_profile
def test_nobody_has_a_token_for_the_api_of_kubernetes(profile: str) -> None:
    accounts = of_kind(rendered(profile), "ServiceAccount")
    assert all(account["automountServiceAccountToken"] is False for account in accounts)
    for name, _, spec in pods(rendered(profile)):
        assert spec["automountServiceAccountToken"] is False, name
        assert spec["serviceAccountName"] in map(name_of, accounts), name


@every_profile
def test_what_is_written_to_is_a_volume_and_everything_else_is_read_only(profile: str) -> None:
    for name, _, spec in pods(rendered(profile)):
        kinds = {volume["name"]: (volume.keys() - {"name"}).pop() for volume in spec.get("volumes", [])}
        for one in spec["containers"]:
            writable = {mount["mountPath"] for mount in one["volumeMounts"] if not mount.get("readOnly")}
            assert writable <= WRITABLE, name
            assert writable & {"/tmp", "/data"}, name
            for mount in one["volumeMounts"]:
                assert mount["name"] in kinds, name
                assert (kinds[mount["name"]] == "emptyDir") != mount.get("readOnly", False), name
        for volume in spec.get("volumes", []):
            assert "sizeLimit" in volume.get("emptyDir", {"sizeLimit": None}), name


@every_profile
def test_variables_that_kubernetes_adds_for_services_stay_out(profile: str) -> None:
    assert all(spec["enableServiceLinks"] is False for _, _, spec in pods(rendered(profile)))


@every_profile
def test_everything_says_what_it_needs_and_how_much_memory_it_may_have(profile: str) -> None:
    for name, one in containers(profile):
        assert {"cpu", "memory"} <= one["resources"]["requests"].keys(), name
        assert "memory" in one["resources"]["limits"], name


@every_profile
def test_images_are_named_exactly_and_each_service_has_its_own(profile: str) -> None:
    images: dict[str, set[str]] = {}
    for _, one in containers(profile):
        reference = one["image"]
        assert "@sha256:" in reference or reference.rpartition(":")[2] not in ("", "latest", reference)
        images.setdefault(one["name"], set()).add(reference)
    used = [image for name, found in images.items() if name != "conformance" for image in found]
    assert len(used) == len(set(used))
    # The test is a client, which the orchestrator's image has.
    assert images["conformance"] == images["orchestrator"]


@every_profile
def test_a_pod_has_the_time_to_leave_and_then_to_finish(profile: str) -> None:
    for workload in services_of_ours(rendered(profile)):
        spec = workload["spec"]["template"]["spec"]
        leaves_s = container(workload)["lifecycle"]["preStop"]["sleep"]["seconds"]
        grace_s = float(environment(workload)["GRACE_S"] or "")
        assert leaves_s >= 1
        assert leaves_s + grace_s + 30 <= spec["terminationGracePeriodSeconds"], name_of(workload)


@every_profile
def test_probes_ask_the_port_that_is_listened_on_by_the_names_that_the_code_has(profile: str) -> None:
    for workload in grpc_services(rendered(profile)):
        one = container(workload)
        address = environment(workload)["LISTEN_ADDRESS"] or ""
        port = int(address.rpartition(":")[2])
        assert {"name": "grpc", "containerPort": port} in one["ports"]
        if health := environment(workload).get("HEALTH_PORT"):
            port = int(health)
            assert {"name": "health", "containerPort": port} in one["ports"]
        assert bool(health) == ("TLS_CERT" in environment(workload))
        ready = {"port": port, "service": HEALTH_NAMES[one["name"]]}
        assert one["startupProbe"]["grpc"] == ready
        assert one["readinessProbe"]["grpc"] == ready
        assert one["livenessProbe"]["grpc"] == {"port": port, "service": LIVENESS}
        # Seen before the next clients come, and long before it is taken for dead.
        assert one["readinessProbe"]["periodSeconds"] <= one["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert one["livenessProbe"]["periodSeconds"] * one["livenessProbe"]["failureThreshold"] >= 60


def start_s(workload: dict[str, Any]) -> int:
    probe = container(workload)["startupProbe"]
    return int(probe["periodSeconds"] * probe["failureThreshold"])


@pytest.mark.parametrize("profile", ONE_MODEL)
def test_an_orchestrator_waits_as_long_as_a_verifier_may_load(profile: str) -> None:
    [orchestrator] = [one for one in services_of_ours(rendered(profile)) if component(one) == "orchestrator"]
    [verifier] = [one for one in services_of_ours(rendered(profile)) if component(one) == "verifier"]
    patience_s = int(environment(orchestrator)["CONNECT_TIMEOUT_S"] or "")
    assert patience_s >= start_s(verifier)
    assert start_s(orchestrator) > patience_s
    assert orchestrator["spec"]["progressDeadlineSeconds"] > start_s(orchestrator)


@every_profile
def test_selectors_find_the_pods_of_their_own_workload_and_no_others(profile: str) -> None:
    manifests = rendered(profile)
    labels = {name: found for name, found, _ in pods(manifests)}
    for workload in workloads(manifests):
        selector = workload["spec"]["selector"]["matchLabels"]
        assert [name for name in labels if selects(selector, labels[name])] == [name_of(workload)]
        for rule in workload["spec"]["template"]["spec"].get("topologySpreadConstraints", []):
            assert rule["labelSelector"]["matchLabels"] == selector
    for budget in of_kind(manifests, "PodDisruptionBudget"):
        selector = budget["spec"]["selector"]["matchLabels"]
        assert [name for name in labels if selects(selector, labels[name])] == [name_of(budget)]


@every_profile
def test_each_of_our_services_is_spread_and_kept_from_going_all_at_once(profile: str) -> None:
    manifests = rendered(profile)
    budgets = {name_of(budget) for budget in of_kind(manifests, "PodDisruptionBudget")}
    for workload in services_of_ours(manifests):
        keys = {rule["topologyKey"] for rule in workload["spec"]["template"]["spec"]["topologySpreadConstraints"]}
        assert keys == {"topology.kubernetes.io/zone", "kubernetes.io/hostname"}
        assert name_of(workload) in budgets


@every_profile
def test_what_scales_has_a_target_that_leaves_the_number_of_replicas_to_it(profile: str) -> None:
    manifests = rendered(profile)
    found = {(one["kind"], name_of(one)): one for one in workloads(manifests)}
    scaled = set()
    for scaler in of_kind(manifests, "HorizontalPodAutoscaler", "ScaledObject"):
        spec = scaler["spec"]
        target = spec["scaleTargetRef"]
        assert (target["kind"], target["name"]) not in scaled
        scaled.add((target["kind"], target["name"]))
        least, most = (spec.get(name) or spec[f"{name[:3]}ReplicaCount"] for name in ("minReplicas", "maxReplicas"))
        assert 1 <= least <= most
        assert target["apiVersion"] == found[target["kind"], target["name"]]["apiVersion"]
    for key, workload in found.items():
        assert ("replicas" in workload["spec"]) == (key not in scaled), key


def test_every_service_can_be_scaled() -> None:
    manifests = rendered("everything")
    scalers = {name_of(scaler) for scaler in of_kind(manifests, "HorizontalPodAutoscaler")}
    # One of the two drafters says itself how many there are.
    assert scalers == {name_of(one) for one in services_of_ours(manifests)} - {"copse-drafter-large-lm"}
