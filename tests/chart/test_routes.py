"""Ways in from outside: routes of the Gateway API and an Ingress, to services and ports that there are."""

from __future__ import annotations

from typing import Any

import pytest

from coppice.v1 import inference_pb2
from tests.chart.rendering import helm, name_of, of_kind, render, rendered


def back_ends(manifest: dict[str, Any]) -> set[tuple[str, Any]]:
    """Names and ports of the Services that a route leads to."""
    if manifest["kind"] == "Ingress":
        paths = [path for rule in manifest["spec"]["rules"] for path in rule["http"]["paths"]]
        return {(one["backend"]["service"]["name"], one["backend"]["service"]["port"]["name"]) for one in paths}
    return {(one["name"], one["port"]) for rule in manifest["spec"]["rules"] for one in rule["backendRefs"]}


def test_each_route_leads_to_a_port_of_a_service() -> None:
    manifests = rendered("everything")
    ports = {
        (name_of(service), port[by])
        for service in of_kind(manifests, "Service")
        for port in service["spec"]["ports"]
        for by in ("name", "port")
    }
    routes = of_kind(manifests, "GRPCRoute", "HTTPRoute", "Ingress")
    assert len(routes) == 3
    for route in routes:
        assert back_ends(route)
        assert back_ends(route) <= ports, route["kind"]


def test_routes_have_the_hosts_parents_and_paths_of_the_values() -> None:
    manifests = rendered("everything")
    [grpc], [http], [ingress] = (of_kind(manifests, kind) for kind in ("GRPCRoute", "HTTPRoute", "Ingress"))
    for route, host in ((grpc, "grpc.example.com"), (http, "api.example.com")):
        assert route["apiVersion"] == "gateway.networking.k8s.io/v1"
        assert (route["spec"]["parentRefs"], route["spec"]["hostnames"]) == ([{"name": "front"}], [host])
    [match] = grpc["spec"]["rules"][0]["matches"]
    assert match["method"]["service"] == inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
    assert http["spec"]["rules"][0]["matches"] == [{"path": {"type": "PathPrefix", "value": "/v1"}}]
    assert ingress["spec"]["tls"] == [{"hosts": ["api.example.com"], "secretName": "front-door"}]


@pytest.mark.parametrize("kind", ["http", "ingress"])
def test_a_route_to_a_gateway_that_is_not_there_is_refused(kind: str) -> None:
    http = {"routes": {"http": {"enabled": True, "parentRefs": [{"name": "front"}]}}}
    values = http if kind == "http" else {"ingress": {"enabled": True, "hosts": ["a.example.com"]}}
    with pytest.raises(helm.HelmError, match=r"gateway\.enabled"):
        render(values)
    with pytest.raises(helm.HelmError, match="parentRefs"):
        render({"routes": {"grpc": {"enabled": True}}})
