"""Who may speak to whom: the edges of the design's picture, and no others."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.chart.rendering import ONE_MODEL, Manifest, component, of_kind, pods, render, rendered, selects, workloads

GUARDED = [profile for profile in ONE_MODEL if profile != "bare"]
DNS = "kube-system"


def parties(manifests: list[Manifest]) -> dict[str, dict[str, str]]:
    """Every component's pods' labels, and those of somebody who is not of the release."""
    own = {labels["app.kubernetes.io/component"]: labels for _, labels, _ in pods(manifests)}
    return {**own, "stranger": {"app": "stranger"}, "balancer": {"app": "gateway"}}


def is_peer(peers: list[dict[str, Any]], labels: dict[str, str]) -> bool:
    """Whether a pod of the same namespace is one of a rule's peers; without any, everybody is."""
    return not peers or any(
        "namespaceSelector" not in peer and selects(peer["podSelector"].get("matchLabels", {}), labels)
        for peer in peers
    )


def ports_between(manifests: list[Manifest], direction: str, pod: dict[str, str], other: dict[str, str]) -> set[int]:
    """Ports that policies let `pod` send to, or be reached at, with `other` at the far end, as Kubernetes has it.

    Policies that select a pod add up; a pod that one of them selects has nothing that none of them allows.
    """
    key, peers = ("ingress", "from") if direction == "Ingress" else ("egress", "to")
    selecting = [
        policy["spec"]
        for policy in of_kind(manifests, "NetworkPolicy")
        if direction in policy["spec"]["policyTypes"] and selects(policy["spec"]["podSelector"]["matchLabels"], pod)
    ]
    if not selecting:
        return {0}
    return {
        port["port"]
        for spec in selecting
        for rule in spec.get(key, [])
        if is_peer(rule[peers], other)
        for port in rule["ports"]
    }


def edges(manifests: list[Manifest]) -> set[tuple[str, str, int]]:
    """Who can open a connection to whom, at which port: both ends have to allow it. Port 0 stands for all."""
    found = set()
    everybody = parties(manifests)
    for caller, caller_labels in everybody.items():
        for called, called_labels in everybody.items():
            out = ports_between(manifests, "Egress", caller_labels, called_labels)
            into = ports_between(manifests, "Ingress", called_labels, caller_labels)
            both = into if out == {0} else out if into == {0} else out & into
            found |= {(caller, called, port) for port in both}
    outsiders = {"stranger", "balancer"}
    return {edge for edge in found if not set(edge[:2]) <= outsiders}


@pytest.mark.parametrize("profile", GUARDED)
def test_policies_allow_exactly_the_edges_of_the_design(profile: str) -> None:
    manifests = rendered(profile)
    drafters = {component(one) for one in workloads(manifests) if component(one).startswith("drafter-")}
    assert drafters
    expected = {("orchestrator", "verifier", 50051), ("test", "orchestrator", 50050)}
    expected |= {("orchestrator", drafter, 50052) for drafter in drafters}
    if profile == "everything":
        expected |= {("orchestrator", "redis", 6379), ("balancer", "orchestrator", 50050)}
        # By default, every pod of the namespace may call the gateway.
        expected |= {("gateway", "orchestrator", 50050), ("stranger", "gateway", 8000), ("balancer", "gateway", 8000)}
    else:
        # By default, every pod of the namespace is a client; of the release's own, only those that may call anybody.
        expected |= {("stranger", "orchestrator", 50050), ("balancer", "orchestrator", 50050)}
    assert edges(manifests) == expected


@pytest.mark.parametrize("profile", GUARDED)
def test_only_those_who_call_by_name_may_ask_for_names(profile: str) -> None:
    asking = set()
    for policy in of_kind(rendered(profile), "NetworkPolicy"):
        if policy["metadata"]["name"].endswith("-traces"):
            continue
        for rule in policy["spec"].get("egress", []):
            for peer in rule["to"]:
                if "namespaceSelector" in peer:
                    assert peer["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": DNS}
                    assert {port["port"] for port in rule["ports"]} == {53}
                    asking.add(policy["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"])
    assert asking == {"orchestrator", "test"} | ({"gateway"} if profile == "everything" else set())


@pytest.mark.parametrize("profile", GUARDED)
def test_those_who_compute_may_reach_the_collector_where_one_is_named(profile: str) -> None:
    found = [one["spec"] for one in of_kind(rendered(profile), "NetworkPolicy") if "-traces" in one["metadata"]["name"]]
    if profile != "everything":
        assert not found
        return
    [spec] = found
    collector, names = spec["egress"]
    assert (collector["ports"], {port["port"] for port in names["ports"]}) == (
        [{"protocol": "TCP", "port": 4317}],
        {53},
    )
    [but] = spec["podSelector"]["matchExpressions"]
    others = {component(one) for one in workloads(rendered(profile))} - set(but["values"])
    assert others == {"orchestrator", "verifier", "drafter-small-lm", "drafter-large-lm"}


@pytest.mark.parametrize("profile", GUARDED)
def test_metrics_are_for_those_who_are_named(profile: str) -> None:
    allowed = [
        peer
        for policy in of_kind(rendered(profile), "NetworkPolicy")
        for rule in policy["spec"].get("ingress", [])
        if any(port["port"] == 9100 for port in rule["ports"])
        for peer in rule["from"]
    ]
    monitoring = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    # One policy of each service: the orchestrator's, the verifier's, and each drafter's.
    assert allowed == [monitoring] * {"everything": 4, "keda": 3}.get(profile, 0)


def test_the_prometheus_that_keda_asks_may_read_metrics() -> None:
    manifests = rendered("keda")
    addresses = {
        urlsplit(trigger["metadata"]["serverAddress"]).hostname or ""
        for scaled in of_kind(manifests, "ScaledObject")
        for trigger in scaled["spec"]["triggers"]
    }
    namespaces = {address.split(".")[1] for address in addresses}
    readers = {
        policy["metadata"]["name"]: {
            peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
            for rule in policy["spec"]["ingress"]
            if 9100 in [port["port"] for port in rule["ports"]]
            for peer in rule["from"]
        }
        for policy in of_kind(manifests, "NetworkPolicy")
        if policy["metadata"]["name"] in {"demo-orchestrator", "demo-verifier", "demo-drafter-small-lm"}
    }
    assert len(namespaces) == 1
    assert list(readers.values()) == [namespaces] * 3


def test_policies_can_be_left_to_others() -> None:
    assert not of_kind(rendered("bare"), "NetworkPolicy")


def test_empty_lists_let_nobody_in_and_nothing_out() -> None:
    nobody = {"clients": [], "httpClients": [], "monitoring": [], "redis": [], "collector": [], "dns": []}
    manifests = render({"gateway": {"enabled": True}, "networkPolicy": nobody})
    everybody = parties(manifests)
    for name in everybody.keys() - {"stranger", "balancer"}:
        for stranger in (everybody["stranger"], everybody["balancer"]):
            assert not ports_between(manifests, "Ingress", everybody[name], stranger), name
            assert not ports_between(manifests, "Egress", everybody[name], stranger), name
