"""Whatever asks for a metric asks for one that a service serves."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

from tests.chart.rendering import NAMESPACE, component, container, environment, of_kind, rendered, selects, workloads
from verifier_svc.metrics import verifier_metrics

METRIC = re.compile(r"\bcoppice_\w+")


def served() -> set[str]:
    """Names of all metrics of a verifier that counts near-ties."""
    counts = ("near_ties", "tokens", "preemptions", "recomputed_tokens", "free_blocks", "waiting", "running")
    engine = SimpleNamespace(**{f"num_{name}": 1 for name in counts})
    info = SimpleNamespace(exact=False, bit_exact=True, near_tie_gap=0.5)
    return {metric.name for metric in verifier_metrics(engine, info)}  # type: ignore[arg-type]


def test_the_dashboard_shows_metrics_that_exist() -> None:
    [settings] = of_kind(rendered("everything"), "ConfigMap")
    dashboard = json.loads(settings["data"]["coppice.json"])
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = {name for query in queries for name in METRIC.findall(query)}
    assert asked <= served()
    # The gap is a setting and needs no panel.
    assert served() - asked == {"coppice_verifier_near_tie_gap"}
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    # Ratios of counts, and rates of counters: a counter by itself says how old a process is.
    for query in queries:
        for name in METRIC.findall(query):
            assert name.endswith("_total") == (f"rate({name}" in query)


def test_what_is_scaled_on_exists() -> None:
    scalers = of_kind(rendered("everything"), "HorizontalPodAutoscaler")
    asked = {
        metric["pods"]["metric"]["name"]
        for scaler in scalers
        for metric in scaler["spec"]["metrics"]
        if metric["type"] == "Pods"
    }
    assert asked
    assert asked <= served()


def test_the_operator_scrapes_the_port_on_which_verifiers_serve_metrics() -> None:
    manifests = rendered("everything")
    [monitor] = of_kind(manifests, "ServiceMonitor")
    selector = monitor["spec"]["selector"]["matchLabels"]
    [service] = [one for one in of_kind(manifests, "Service") if selects(selector, one["metadata"]["labels"])]
    [endpoint] = monitor["spec"]["endpoints"]
    ports = {port["name"]: port["port"] for port in service["spec"]["ports"]}
    [verifier] = [one for one in workloads(manifests) if component(one) == "verifier"]
    assert str(ports[endpoint["port"]]) == environment(verifier)["METRICS_PORT"]
    assert {"name": "metrics", "containerPort": ports["metrics"]} in container(verifier)["ports"]
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert NAMESPACE not in json.dumps(monitor)


def test_without_metrics_nothing_of_them_is_left() -> None:
    text = json.dumps(rendered("bare"))
    assert "METRICS_PORT" not in text
    assert "9100" not in text
