"""Everything that a manifest names exists: addresses, ports, volumes, Secrets, accounts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from coppice.lab.conformance.catalogue import cases_like
from tests.broken_toys.drawing import WrongDraftAccepted
from tests.chart.rendering import (
    GIVEN,
    NAMESPACE,
    ONE_MODEL,
    PROFILES,
    component,
    environment,
    name_of,
    notes,
    of_kind,
    pods,
    render,
    rendered,
    selects,
    services_of_ours,
    values_of,
    workloads,
)
from tests.integration.conformance_results import results
from tests.toy_deployment import ToyDeployment

MOST_BY_DEFAULT = 4
every_profile = pytest.mark.parametrize("profile", PROFILES)
every_one_model = pytest.mark.parametrize("profile", ONE_MODEL)


@every_profile
def test_names_are_unique(profile: str) -> None:
    names = [(manifest["kind"], name_of(manifest)) for manifest in rendered(profile)]
    assert len(names) == len(set(names))


def test_the_longest_names_still_fit() -> None:
    drafter = {"name": "d" * 15, "kind": "small-lm", "config": {"MODEL": "/models/small-lm"}}
    manifests = render({"fullnameOverride": "n" * 28, "drafters": [drafter]})
    assert all(len(name_of(manifest)) <= 63 for manifest in manifests)
    # A label of each pod is the name of its set, a hyphen and a hash of ten characters.
    assert max(len(name_of(one)) for one in of_kind(manifests, "StatefulSet")) == 63 - 11


@every_profile
def test_services_lead_to_ports_that_pods_have(profile: str) -> None:
    manifests = rendered(profile)
    for service in of_kind(manifests, "Service"):
        found = [spec for _, labels, spec in pods(manifests) if selects(service["spec"]["selector"], labels)]
        assert len(found) == 1, name_of(service)
        ports = {port["name"] for one in found[0]["containers"] for port in one["ports"]}
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in ports, name_of(service)
            number = {one["name"]: one["containerPort"] for one in found[0]["containers"][0]["ports"]}
            assert port["port"] == number[port["targetPort"]]


def addresses(profile: str) -> Iterator[tuple[str, str, int]]:
    """What orchestrators call: the component, and host and port."""
    [orchestrator] = [one for one in workloads(rendered(profile)) if component(one) == "orchestrator"]
    variables = environment(orchestrator)
    for variable, wanted in (("VERIFIER_ADDRESS", "verifier"), ("DRAFTER_ADDRESSES", "drafter")):
        for address in (variables[variable] or "").split(","):
            if address:
                host, _, port = address.rpartition(":")
                yield wanted, host, int(port)


@every_one_model
def test_orchestrators_call_every_replica_that_there_may_be_by_its_name(profile: str) -> None:
    manifests = rendered(profile)
    headless = {name_of(one): one for one in of_kind(manifests, "Service") if one["spec"].get("clusterIP") == "None"}
    most = {name_of(one): one["spec"]["maxReplicas"] for one in of_kind(manifests, "HorizontalPodAutoscaler")}
    most |= {name_of(one): one["spec"]["maxReplicaCount"] for one in of_kind(manifests, "ScaledObject")}
    called = list(addresses(profile))
    expected = set()
    for workload in of_kind(manifests, "StatefulSet"):
        service = headless[workload["spec"]["serviceName"]]
        assert selects(service["spec"]["selector"], workload["spec"]["template"]["metadata"]["labels"])
        port = next(one["port"] for one in service["spec"]["ports"] if one["name"] == "grpc")
        kind = component(workload).partition("-")[0]
        known = sum(host.endswith(f".{name_of(service)}") for _, host, _ in called)
        # By default there may be four, of a workload that is not scaled automatically, too.
        assert known == most.get(name_of(workload), max(workload["spec"].get("replicas", 0), MOST_BY_DEFAULT))
        for ordinal in range(known):
            expected.add((kind, f"{name_of(workload)}-{ordinal}.{name_of(service)}", port))
    assert set(called) == expected
    assert len(called) == len(expected)


@every_profile
def test_what_is_not_of_the_chart_is_named_in_values(profile: str) -> None:
    manifests = rendered(profile)
    own = {(manifest["kind"], name_of(manifest)) for manifest in manifests}
    # cert-manager makes them.
    own |= {("Secret", one["spec"]["secretName"]) for one in of_kind(manifests, "Certificate")}
    for name, _, spec in pods(manifests):
        used = {("Secret", one["name"]) for one in spec.get("imagePullSecrets", [])}
        for volume in spec.get("volumes", []):
            if claim := volume.get("persistentVolumeClaim"):
                used.add(("PersistentVolumeClaim", claim["claimName"]))
            if secret := volume.get("secret"):
                used.add(("Secret", secret["secretName"]))
            if settings := volume.get("configMap"):
                used.add(("ConfigMap", settings["name"]))
            if secret := volume.get("secret"):
                used.add(("Secret", secret["secretName"]))
        for one in spec["containers"]:
            for variable in one.get("env", []):
                if "valueFrom" in variable:
                    used.add(("Secret", variable["valueFrom"]["secretKeyRef"]["name"]))
        assert used <= own | GIVEN, name


@every_profile
def test_a_secret_s_value_is_in_no_manifest(profile: str) -> None:
    assert not of_kind(rendered(profile), "Secret")
    for workload in services_of_ours(rendered(profile)):
        assert environment(workload).get("CACHE_SECRET") is None


def test_tokens_are_a_file_of_the_secret_that_follows_its_changes() -> None:
    [orchestrator] = [one for one in workloads(rendered("everything")) if component(one) == "orchestrator"]
    spec = orchestrator["spec"]["template"]["spec"]
    [volume] = [one for one in spec["volumes"] if "secret" in one]
    [mount] = [one for one in spec["containers"][0]["volumeMounts"] if one["name"] == volume["name"]]
    [item] = volume["secret"]["items"]
    assert volume["secret"]["secretName"] == "tokens"
    assert environment(orchestrator)["TOKENS_FILE"] == f"{mount['mountPath']}/{item['path']}"
    assert mount["readOnly"]
    # A file that is mounted by itself stays what it was.
    assert "subPath" not in mount
    [default] = [one for one in workloads(rendered("default")) if component(one) == "orchestrator"]
    assert "TOKENS_FILE" not in environment(default)


def test_the_redis_of_the_chart_is_the_one_that_is_called() -> None:
    manifests = rendered("everything")
    [orchestrator] = [one for one in workloads(manifests) if component(one) == "orchestrator"]
    [redis] = [one for one in of_kind(manifests, "Service") if component(one) == "redis"]
    [port] = redis["spec"]["ports"]
    assert environment(orchestrator)["REDIS_URL"] == f"redis://{name_of(redis)}:{port['port']}/0"


def test_a_redis_of_somebody_else_comes_from_the_secret() -> None:
    [orchestrator] = [one for one in workloads(rendered("bare")) if component(one) == "orchestrator"]
    assert {"REDIS_URL": None, "CACHE_SECRET": None}.items() <= environment(orchestrator).items()
    assert not [one for one in rendered("bare") if component(one) == "redis"]


def test_what_helm_test_runs_calls_the_front_door() -> None:
    for profile in PROFILES:
        tests = of_kind(rendered(profile), "Pod")
        assert len(tests) == (2 if profile == "models" else 1)
        for test in tests:
            assert test["metadata"]["annotations"]["helm.sh/hook"] == "test"
            [one] = test["spec"]["containers"]
            host, _, port = one["command"][one["command"].index("--address") + 1].rpartition(":")
            [service] = [found for found in of_kind(rendered(profile), "Service") if name_of(found) == host]
            assert int(port) in [found["port"] for found in service["spec"]["ports"]]


@every_one_model
def test_notes_name_what_there_is(profile: str) -> None:
    text = notes(profile)
    [orchestrator] = [one for one in workloads(rendered(profile)) if component(one) == "orchestrator"]
    assert ("service/copse-gateway 8000" in text) == (profile == "everything")
    assert f"deployment/{name_of(orchestrator)}" in text
    assert f"--namespace {NAMESPACE}" in text
    assert ("WARNING" in text) == (profile == "bare")


@pytest.mark.parametrize("profile", ["default", "tls"])
def test_more_replicas_within_the_maximum_start_nobody_again(profile: str) -> None:
    """`helm upgrade`, `kubectl scale` and autoscalers differ in a number of replicas alone."""
    values = values_of(profile)
    one = render(values)
    values = {**values, "verifier": {**values.get("verifier", {}), "replicas": 3}}
    values["drafterDefaults"] = {**values.get("drafterDefaults", {}), "replicas": 4}
    more = render(values)
    changed = [name_of(new) for old, new in zip(one, more, strict=True) if old != new]
    assert changed
    for old, new in zip(one, more, strict=True):
        if old != new:
            assert (old["spec"].pop("replicas"), new["spec"].pop("replicas")) in ((1, 3), (1, 4))
            assert old == new


async def test_what_helm_test_runs_is_a_part_of_the_conformance_suite_that_finds_a_wrong_token() -> None:
    [test] = of_kind(rendered("default"), "Pod")
    [one] = test["spec"]["containers"]
    assert one["command"][:2] == ["coppice", "conformance"]
    patterns = [part.removeprefix("--only=") for part in one["args"] if part.startswith("--only=")]
    for pattern in patterns:
        assert cases_like([pattern]), pattern
    assert {result.status for result in (await results(ToyDeployment(), *patterns)).values()} == {"passed"}
    wrong = await results(WrongDraftAccepted(), *patterns)
    assert {name for name, result in wrong.items() if result.status == "failed"} >= {
        "greedy/with-and-without-speculation",
        "lossless/temperature-1",
    }
