"""The chart's values: strict, and by the names that the services know."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from coppice.obs.logs import LogSettings
from coppice.obs.otel import open_tracing
from scripts.configuration import SERVICES, SET_BY_THE_CHART, operators
from tests.chart.rendering import (
    CHART,
    PROFILES,
    component,
    environment,
    grpc_services,
    helm,
    of_kind,
    render,
    rendered,
    services_of_ours,
    values_of,
)


def service_of(workload: dict[str, Any]) -> str:
    return workload["spec"]["template"]["spec"]["containers"][0]["name"]


def settings(config: Any) -> set[str]:
    return set(operators(config))


ISSUED = {"issuerRef": {"name": "a"}}
TLS: dict[str, Any] = {"tls": {"enabled": True, "public": ISSUED, "internal": ISSUED}}
HTTP: dict[str, Any] = {"gateway": {"enabled": True}}


@pytest.mark.parametrize("profile", PROFILES)
def test_helm_finds_nothing_to_complain_about(profile: str) -> None:
    report = helm.lint(CHART, values_of(profile), strict=True, kube_version="v1.30.0")
    assert report["total_charts_linted"] == 1
    assert not report["errors"]
    # Information is let pass: that an icon is recommended.
    assert all(message["severity"] <= 1 for message in report["messages"]), report["messages"]


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"orchestrater": {}}, "orchestrater"),
        ({"orchestrator": {"replicas": "two"}}, "replicas"),
        ({"orchestrator": {"replicas": 0}}, "replicas"),
        ({"orchestrator": {"config": {"MAX_NODE": 4}}}, "MAX_NODE"),
        ({"orchestrator": {"config": {"VERIFIER_ADDRESS": "a:1"}}}, "VERIFIER_ADDRESS"),
        ({"orchestrator": {"autoscaling": {"triggers": [{"type": "cpu", "metadata": {}}]}}}, "triggers"),
        ({"verifier": {"config": {"GRACE_S": 1.5}}}, "GRACE_S"),
        ({"verifier": {"config": {"MODEL": "org/model-on-a-hub"}}}, "MODEL"),
        ({"verifier": {"weights": {"persistentVolumeClaim": {}, "image": {}}}}, "weights"),
        ({"verifier": {"image": {"digest": "sha256:short"}}}, "digest"),
        ({"drafters": [{"name": "a", "kind": "small-lm"}]}, "config"),
        ({"drafters": [{"name": "Not A Name", "kind": "small-lm", "config": {}}]}, "name"),
        ({"redis": {"enabled": True}}, "existingSecret"),
        ({"tokens": {"secret": "a"}}, "secret"),
        ({"gateway": {"config": {"ORCHESTRATOR_ADDRESS": "a:1"}}}, "ORCHESTRATOR_ADDRESS"),
        ({"ingress": {"enabled": True}}, "hosts"),
        ({"metrics": {"prometheusRule": {"lateShare": 2}}}, "lateShare"),
        ({"orchestrator": {"podLabels": {"a": 1}}}, "podLabels"),
        ({"orchestrator": {"podLabels": {"app.kubernetes.io/name": "a"}}}, "app.kubernetes.io/name"),
        ({"verifier": {"extraEnv": [{"name": "TARGET_REVISION", "value": "a"}]}}, "extraEnv"),
        ({"verifier": {"extraEnv": [{"name": "A", "value": 5}]}}, "extraEnv"),
        ({"fullnameOverride": "My_Release"}, "begins with a letter"),
        ({"networkPolicy": {"clients": "everybody"}}, "clients"),
        ({"tls": {"enabled": True}}, "tls"),
        ({"tls": {"enabled": True, "public": {"existingSecret": "a"}}}, "internal"),
        ({"tls": {"internal": {"issuerRef": {"nmae": "a"}}}}, "nmae"),
        ({"tracing": {"config": {"OTEL": "on"}}}, "OTEL"),
        ({"tracing": {"endpoint": "collector:4317"}}, "endpoint"),
        ({"metrics": {"tls": {"enabled": True}}}, "tls"),
        ({"metrics": {"tls": {"mode": "on"}}}, "mode"),
        ({"logging": {"level": "LOUD"}}, "level"),
        ({"logging": {"format": "xml"}}, "format"),
        ({"tls": {"public": {"clientCertificates": True}}}, "clientCertificates needs tls.enabled"),
        (TLS | {"tls": {**TLS["tls"], "duration": "24h"}}, "renewBefore 720h must be less than tls.duration 24h"),
        ({"metrics": {"enabled": False, "serviceMonitor": {"enabled": True}}}, "serviceMonitor needs metrics.enabled"),
        ({"metrics": {"enabled": False, "prometheusRule": {"enabled": True}}}, "prometheusRule needs metrics.enabled"),
        ({"metrics": {"serviceMonitor": {"interval": "30"}}}, "interval"),
        ({"tracing": {"config": {"TRACE_ROUNDS": "on"}}}, "tracing.config needs tracing.endpoint"),
        (HTTP | {"ingress": {"enabled": True, "hosts": ["a.com"], "paths": []}}, "paths"),
        (HTTP | {"ingress": {"enabled": True, "hosts": ["a.com"], "paths": ["v1"]}}, "paths"),
        (HTTP | {"ingress": {"enabled": True, "hosts": ["a.com", "a.com"]}}, "hosts"),
        ({"orchestrator": {"config": {"MAX_REQUESTS": "abc"}}}, "MAX_REQUESTS"),
        ({"orchestrator": {"config": {"REQUIRE_DRAFTERS": "maybe"}}}, "REQUIRE_DRAFTERS"),
        ({"verifier": {"image": {"tag": "a b"}}}, "tag"),
        ({"verifier": {"extraVolumes": [{"name": "tmp", "emptyDir": {}}]}}, "extraVolumes"),
        ({"verifier": {"extraVolumeMounts": [{"name": "mine", "mountPath": "/tmp"}]}}, "extraVolumeMounts"),
        ({"gateway": {"config": {"GRACE_S": None}}}, "GRACE_S"),
        ({"drafterDefaults": {"config": {"GRACE_S": None}}}, "GRACE_S"),
        ({"verifier": {"extraEnv": [{"name": "LISTEN_ADDRESS", "value": "[::]:1"}]}}, "LISTEN_ADDRESS twice"),
        ({"orchestrator": {"extraEnv": [{"name": "GRACE_S", "value": "1"}]}}, "orchestrator has .* GRACE_S twice"),
        (
            {"tracing": {"endpoint": "http://c:4317", "config": {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://d:4317"}}},
            "OTEL_EXPORTER_OTLP_ENDPOINT twice",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_values_that_do_not_fit_are_refused_by_name(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(helm.HelmError, match=complaint):
        render(values)


def objects(schema: Any) -> list[dict[str, Any]]:
    """Every schema of an object with properties, at any depth."""
    if isinstance(schema, list):
        return [found for part in schema for found in objects(part)]
    if not isinstance(schema, dict):
        return []
    own = [schema] if schema.get("type") == "object" and "properties" in schema else []
    return own + [found for part in schema.values() for found in objects(part)]


def test_the_schema_lets_no_unknown_name_pass() -> None:
    found = objects(json.loads((CHART / "values.schema.json").read_text()))
    assert len(found) > 10
    assert all(schema["additionalProperties"] is False for schema in found)


def test_two_drafters_cannot_have_one_name() -> None:
    twice = [{"name": "a", "kind": "small-lm", "config": {"MODEL": model}} for model in ("/models/a", "/models/b")]
    with pytest.raises(helm.HelmError, match="drafters has two entries"):
        render({"drafters": twice})


@pytest.mark.parametrize("service", SERVICES)
def test_values_may_set_each_setting_of_a_service_and_nothing_else(service: str) -> None:
    definitions = json.loads((CHART / "values.schema.json").read_text())["definitions"]
    offered = set(definitions[f"{service}Config"]["properties"])
    known = settings(SERVICES[service]) - SET_BY_THE_CHART
    assert offered == known, f"k8s/values.schema.json, definitions.{service}Config: {sorted(offered ^ known)}"


@pytest.mark.parametrize("profile", PROFILES)
def test_services_accept_the_environment_that_they_get(profile: str) -> None:
    for workload in services_of_ours(rendered(profile)):
        given: Mapping[str, str | None] = own_environment(workload)
        config = SERVICES[service_of(workload)]
        assert given.keys() <= settings(config)
        variables = {name: "redis://elsewhere:6379" if value is None else value for name, value in given.items()}
        config.from_env(variables)


def own_environment(workload: dict[str, Any]) -> dict[str, str | None]:
    """What a service's own settings are read from: tracing and logs have variables of their own."""
    logs = ("LOG_LEVEL", "LOG_FORMAT")
    return {name: value for name, value in environment(workload).items() if not is_tracing(name) and name not in logs}


@pytest.mark.parametrize("level", ["WARNING", "DEBUG,numba=INFO,grpc._cython=ERROR"])
def test_every_service_logs_as_is_asked_for(level: str) -> None:
    defaults = {name for one in services_of_ours(rendered("default")) for name in [environment(one)["LOG_FORMAT"]]}
    assert defaults == {"text"}
    for workload in services_of_ours(render({"logging": {"level": level, "format": "json"}})):
        given = {name: value or "" for name, value in environment(workload).items()}
        assert (given["LOG_LEVEL"], given["LOG_FORMAT"]) == (level, "json")
        # Services take whatever the schema lets through.
        LogSettings.from_env(given)


def is_tracing(name: str) -> bool:
    return name.startswith("OTEL_") or name == "TRACE_ROUNDS"


@pytest.mark.parametrize("profile", PROFILES)
def test_services_trace_where_a_collector_is_named(profile: str) -> None:
    # The gateway traces nothing itself.
    for workload in grpc_services(rendered(profile)):
        found = {name: value for name, value in environment(workload).items() if is_tracing(name)}
        if profile != "everything":
            assert not found
            continue
        assert found == {
            "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector.tracing:4317",
            "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
            "OTEL_TRACES_SAMPLER_ARG": "0.1",
            "TRACE_ROUNDS": "1",
        }
        assert open_tracing("coppice-test", {**found, "OTEL_SDK_DISABLED": "true"}) is None


def test_large_numbers_are_written_out() -> None:
    [orchestrator] = [one for one in services_of_ours(rendered("everything")) if service_of(one) == "orchestrator"]
    assert environment(orchestrator)["MAX_QUEUED"] == "10000000"
    assert environment(orchestrator)["CACHE_DRAFTER"] == "true"


ON_A_GPU: dict[str, Any] = {
    "config": {"DEVICE": "cuda"},
    "weights": {"persistentVolumeClaim": {"claimName": "drafter-weights"}},
    "resources": {"requests": {"cpu": "2", "nvidia.com/gpu": 1}, "limits": {"nvidia.com/gpu": 1}},
    "nodeSelector": {"nvidia.com/gpu.present": "true"},
    "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}},
    "autoscaling": {"enabled": True, "maxReplicas": 3},
}


def test_a_drafter_can_do_without_the_volume_the_node_and_the_gpu_of_the_others() -> None:
    own = {
        "weights": {"emptyDir": {}},
        "resources": {"requests": {"cpu": "1"}},
        "nodeSelector": {"example.com/cpu": "large"},
        "affinity": {},
    }
    nothing: dict[str, Any] = {name: {} for name in own}
    drafters = [
        {"name": "as-all", "kind": "small-lm", "config": {}},
        {"name": "other", "kind": "small-lm", "config": {"DEVICE": "cpu"}, **own},
        {"name": "bare", "kind": "small-lm", "config": {}, **nothing},
    ]
    manifests = render({"drafterDefaults": ON_A_GPU, "drafters": drafters})
    specs = {component(one): one["spec"]["template"]["spec"] for one in services_of_ours(manifests)}
    found = {
        name: {
            "weights": {
                key: what
                for volume in specs[name]["volumes"]
                if volume["name"] == "weights"
                for key, what in volume.items()
                if key != "name"
            },
            "resources": specs[name]["containers"][0]["resources"],
            "nodeSelector": specs[name].get("nodeSelector", {}),
            "affinity": specs[name].get("affinity", {}),
        }
        for name in ("drafter-as-all", "drafter-other", "drafter-bare")
    }
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())["drafterDefaults"]["resources"]
    with_gpu = {part: defaults[part] | ON_A_GPU["resources"][part] for part in ("requests", "limits")}
    assert found["drafter-as-all"] == {name: ON_A_GPU[name] for name in own} | {"resources": with_gpu}
    assert found["drafter-other"] == own
    assert found["drafter-bare"] == nothing


def test_what_a_drafter_does_not_say_of_its_autoscaling_it_has_from_the_defaults() -> None:
    drafters = [
        {"name": "a", "kind": "small-lm", "config": {}, "autoscaling": {"maxReplicas": 5}},
        {"name": "b", "kind": "small-lm", "config": {}, "autoscaling": {"enabled": False}, "replicas": 2},
    ]
    issuers = {part: {"issuerRef": {"name": "ours"}} for part in ("public", "internal")}
    manifests = render({"drafterDefaults": ON_A_GPU, "drafters": drafters, "tls": {"enabled": True, **issuers}})
    [scaler] = of_kind(manifests, "HorizontalPodAutoscaler")
    assert (scaler["spec"]["minReplicas"], scaler["spec"]["maxReplicas"]) == (1, 5)
    # As many as there may be, which the defaults say.
    wanted = {"a": 5, "b": 3}
    [orchestrator] = [one for one in services_of_ours(manifests) if service_of(one) == "orchestrator"]
    addresses = (environment(orchestrator)["DRAFTER_ADDRESSES"] or "").split(",")
    certificates = {component(one): one["spec"]["dnsNames"] for one in of_kind(manifests, "Certificate")}
    for name, count in wanted.items():
        assert len([one for one in addresses if f"-drafter-{name}-" in one.split(".")[0]]) == count
        assert len(certificates[f"drafter-{name}"]) == count


def test_an_eagle_drafter_is_told_the_target_unless_it_says_itself() -> None:
    drafters = [
        {"name": "small-lm", "kind": "small-lm", "config": {"MODEL": "/models/small-lm"}},
        {"name": "eagle", "kind": "eagle", "config": {"MODEL": "/weights/eagle"}},
        {"name": "other", "kind": "eagle", "config": {"MODEL": "/weights/eagle", "TARGET_MODEL": "/weights/same"}},
    ]
    manifests = render({"verifier": {"config": {"MODEL": "/weights/target"}}, "drafters": drafters})
    found = {component(one): environment(one).get("TARGET_MODEL") for one in services_of_ours(manifests)}
    expected = {"drafter-small-lm": None, "drafter-eagle": "/weights/target", "drafter-other": "/weights/same"}
    assert {name: target for name, target in found.items() if name.startswith("drafter-")} == expected


def test_a_drafter_has_the_defaults_and_its_own_settings_over_them() -> None:
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())["drafterDefaults"]["config"]
    small, large = (
        next(environment(one) for one in services_of_ours(rendered("everything")) if one["metadata"]["name"] == name)
        for name in ("copse-drafter-small-lm", "copse-drafter-large-lm")
    )
    assert (small["GRACE_S"], small["THREADS"]) == (str(defaults["GRACE_S"]), str(defaults["THREADS"]))
    assert (large["GRACE_S"], large["THREADS"], large["DEVICE"]) == ("9", "3", defaults["DEVICE"])


@pytest.mark.parametrize("value", ["12", " 12 ", "", "$(NODE_REQUESTS)", 12])
def test_numbers_may_be_texts_that_are_numbers(value: object) -> None:
    render({"orchestrator": {"config": {"MAX_REQUESTS": value}}})


def test_texts_that_look_like_numbers_stay_texts() -> None:
    values = {
        **HTTP,
        "tokens": {"existingSecret": "12345"},
        "ingress": {"enabled": True, "hosts": ["*.example.com"], "tlsSecret": "2026"},
        "verifier": {"priorityClassName": "123", "runtimeClassName": "on"},
        "redis": {"enabled": True, "existingSecret": "7", "maxMemory": "268435456"},
    }
    found = str(render(values))
    for text in ("12345", "2026", "123", "on", "7", "268435456", "*.example.com"):
        assert f"'{text}'" in found
        assert f": {text}," not in found
