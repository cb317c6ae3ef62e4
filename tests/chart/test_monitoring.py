"""Whatever asks for a metric asks for one that a service serves."""

from __future__ import annotations

import json
import re
from typing import Any

from tests.chart.rendering import (
    ROOT,
    component,
    container,
    environment,
    grpc_services,
    name_of,
    of_kind,
    render,
    rendered,
    selects,
    services_of_ours,
    values_of,
)
from tests.chart.test_certificates import secret_behind

METRIC = re.compile(r"\bcoppice_\w+")


def served() -> set[str]:
    """Names of all metrics; another test holds this table equal to what is served."""
    return set(re.findall(r"^\| `(coppice_\w+)` \|", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE))


def test_the_dashboard_shows_metrics_that_exist() -> None:
    [settings] = of_kind(rendered("everything"), "ConfigMap")
    dashboard = json.loads(settings["data"]["coppice.json"])
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = {name for query in queries for name in METRIC.findall(query)}
    assert asked
    assert asked <= served()
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


def test_the_operator_scrapes_every_service_once_where_it_serves_metrics() -> None:
    manifests = rendered("everything")
    monitor, gateway = of_kind(manifests, "ServiceMonitor")
    [service] = [one for one in of_kind(manifests, "Service") if component(one) == "gateway"]
    assert selects(gateway["spec"]["selector"]["matchLabels"], service["metadata"]["labels"])
    assert gateway["spec"]["endpoints"][0]["port"] == "http"
    [endpoint] = monitor["spec"]["endpoints"]
    selector = monitor["spec"]["selector"]["matchLabels"]
    scraped = [
        (component(service), port["port"])
        for service in of_kind(manifests, "Service")
        if selects(selector, service["metadata"]["labels"])
        for port in service["spec"]["ports"]
        if port["name"] == endpoint["port"]
    ]
    serving = [(component(one), int(environment(one)["METRICS_PORT"] or 0)) for one in grpc_services(manifests)]
    assert sorted(scraped) == sorted(serving)
    assert all(
        {"name": "metrics", "containerPort": 9100} in container(one)["ports"] for one in grpc_services(manifests)
    )
    assert monitor["metadata"]["labels"]["release"] == "prometheus"


def test_metrics_over_tls_are_scraped_by_a_name_and_an_authority_of_their_certificate() -> None:
    values = {**values_of("tls"), "metrics": {"tls": {"enabled": True}, "serviceMonitor": {"enabled": True}}}
    manifests = render(values)
    names = {one["spec"]["secretName"]: one["spec"]["dnsNames"] for one in of_kind(manifests, "Certificate")}
    monitors = of_kind(manifests, "ServiceMonitor")
    scraped = []
    for monitor in monitors:
        [endpoint] = monitor["spec"]["endpoints"]
        assert endpoint["scheme"] == "https"
        authority = endpoint["tlsConfig"]["ca"]["secret"]
        assert authority["key"] == "ca.crt"
        assert endpoint["tlsConfig"]["serverName"] in names[authority["name"]]
        selector = monitor["spec"]["selector"]["matchLabels"]
        for workload in services_of_ours(manifests):
            if selects(selector, workload["metadata"]["labels"]):
                scraped.append(component(workload))
                certificate, environ = environment(workload)["TLS_CERT"], environment(workload)
                assert secret_behind(workload, certificate or "")[0] == authority["name"]
                assert environ["METRICS_TLS"] == "on"
    assert sorted(scraped) == sorted(component(one) for one in services_of_ours(manifests))


def test_metrics_are_plain_http_unless_it_is_asked_for() -> None:
    for workload in services_of_ours(rendered("tls")):
        assert "METRICS_TLS" not in environment(workload)


def test_without_metrics_nothing_of_them_is_left() -> None:
    text = json.dumps(rendered("bare"))
    assert "METRICS_PORT" not in text
    assert "9100" not in text


RUNBOOKS = ROOT / "docs" / "runbooks"
# Alerts of what an installation need not have, and the values without which there is none.
OPTIONAL = {"CoppiceNoDrafter": "drafters", "CoppiceCertificateExpires": "tls", "CoppiceRedisAway": "redis"}


def alerts(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    [rule] = of_kind(render(values), "PrometheusRule")
    return {one["alert"]: one for group in rule["spec"]["groups"] for one in group["rules"]}


def test_each_alert_asks_for_metrics_that_exist_and_has_a_page() -> None:
    issuers = {part: {"issuerRef": {"name": "ours"}} for part in ("public", "internal")}
    found = alerts({**values_of("everything"), "tls": {"enabled": True, **issuers}})
    pages = set()
    for name, alert in found.items():
        asked = set(METRIC.findall(alert["expr"]))
        assert asked, name
        assert asked <= served(), name
        # Of this release, by the labels that the operator gives to what it scrapes.
        assert alert["expr"].count('namespace="models", service=') == alert["expr"].count("coppice_"), name
        page = RUNBOOKS / f"{alert['annotations']['runbook_url'].rstrip('/').rpartition('/')[2]}.md"
        assert f"Alert `{name}`" in page.read_text()
        pages.add(page)
    assert pages == set(RUNBOOKS.glob("*.md"))
    for page in pages:
        asked = {metric for metric in METRIC.findall(page.read_text()) if not metric.endswith("_")}
        assert asked <= served(), page


def test_services_that_alerts_name_are_scraped() -> None:
    manifests = rendered("everything")
    services = {name_of(one) for one in of_kind(manifests, "Service")}
    for alert in alerts(values_of("everything")).values():
        named = set(re.findall(r'service="([^"]+)"', alert["expr"]))
        assert named <= services


def test_there_is_no_alert_for_what_is_not_installed() -> None:
    values: dict[str, Any] = {"drafters": [], "metrics": {"prometheusRule": {"enabled": True}}}
    found = alerts(values).keys()
    everything = alerts({**values_of("everything"), "metrics": {"prometheusRule": {"enabled": True}}}).keys()
    assert not found & OPTIONAL.keys()
    assert everything - found == OPTIONAL.keys() - {"CoppiceCertificateExpires"}
