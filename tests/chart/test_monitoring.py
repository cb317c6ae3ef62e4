"""Whatever asks for a metric asks for one that a service serves."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.chart.quantities import family, is_counter, quantity
from tests.chart.rendering import (
    NAMESPACE,
    ROOT,
    Manifest,
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


def types() -> dict[str, str]:
    """Types of all metrics by name; another test holds this table equal to what is served."""
    return dict(
        re.findall(r"^\| `(coppice_\w+)` \| (\w+) \|", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE)
    )


def served() -> set[str]:
    """Names of all metrics."""
    return set(types())


def dashboard(manifests: list[Manifest]) -> dict[str, Any]:
    [settings] = of_kind(manifests, "ConfigMap")
    [text] = settings["data"].values()
    return json.loads(text)


SHOWN = dashboard(rendered("everything"))
PANELS = [panel for panel in SHOWN["panels"] if panel["type"] != "row"]
every_panel = pytest.mark.parametrize("panel", PANELS, ids=[panel["title"] for panel in PANELS])
# What the metrics of a row's panels begin with. Redis serves none: its row has what orchestrators see of it.
ROWS = {
    "Orchestrator": r"coppice_orchestrator_(?!prefix_cache_)",
    "Verifier": "coppice_verifier_",
    "Drafters": "coppice_drafter_",
    "Gateway": "coppice_gateway_",
    "Redis": "coppice_orchestrator_prefix_cache_",
}
# What units of Grafana are for; texts of our own are a rate where they end in "/s", and a ratio where they say "per".
UNITS = {"short": "count", "reqps": "rate", "percentunit": "share", "s": "seconds", "bytes": "bytes"}


def use_of(unit: str) -> str:
    """What a panel's unit is for."""
    own = unit.removeprefix("suffix: ")
    return UNITS[unit] if own == unit else "rate" if re.fullmatch(r"\w+/s", own) else "ratio" if " per " in own else ""


def queries_of(panel: dict[str, Any]) -> list[str]:
    return [target["expr"] for target in panel["targets"]]


@every_panel
def test_a_panel_of_the_dashboard_shows_metrics_that_exist(panel: dict[str, Any]) -> None:
    for query in queries_of(panel):
        asked = METRIC.findall(query)
        assert asked
        for name in asked:
            assert (types().get(family(name)) == "histogram") == (family(name) != name), name
            assert family(name) in served(), name
            # A counter by itself says how old a process is.
            assert is_counter(name) == (types()[family(name)] != "gauge"), name
            assert is_counter(name) == (f"rate({name}" in query), name
        # All are of the release and the namespace that are chosen.
        chosen = query.count('{namespace="$namespace", service="$release-')
        assert chosen + query.count('{namespace="$namespace", service=~"$release-') == len(asked)


@every_panel
def test_a_panel_s_unit_is_that_of_all_its_queries(panel: dict[str, Any]) -> None:
    use = use_of(panel["fieldConfig"]["defaults"]["unit"])
    assert {quantity(query) for query in queries_of(panel)} == {"ratio" if use == "share" else use}


def test_each_service_has_a_row_with_its_own_metrics() -> None:
    rows: dict[str, list[str]] = {}
    for panel in SHOWN["panels"]:
        if panel["type"] == "row":
            title = panel["title"]
        else:
            rows.setdefault(title, []).extend(METRIC.findall(" ".join(queries_of(panel))))
    assert rows.keys() == ROWS.keys()
    for title, names in rows.items():
        assert all(re.match(ROWS[title], name) for name in names), title


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    assert len({panel["id"] for panel in SHOWN["panels"]}) == len(SHOWN["panels"])
    cells = [
        (place["x"] + column, place["y"] + line)
        for place in (panel["gridPos"] for panel in SHOWN["panels"])
        for column in range(place["w"])
        for line in range(place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(column for column, _ in cells) < 24


def test_a_dashboard_is_of_one_release_which_it_shows_first() -> None:
    values = {"metrics": {"dashboard": {"enabled": True}}}
    shown = [dashboard(render(values, release)) for release in ("demo", "demo-two")]
    several = dashboard(render({**values, "models": [{"name": "code"}, {"name": "chat"}]}))
    for one, release in zip((*shown, several), ("demo", "demo-two", "demo-code"), strict=True):
        first = {each["name"]: each.get("current", {}).get("value") for each in one["templating"]["list"]}
        assert first == {"datasource": None, "namespace": NAMESPACE, "release": release}
    for name in ("uid", "title"):
        assert shown[0][name] != shown[1][name]
    assert len(shown[0]["uid"]) <= 40  # Grafana's limit
    # Grafana's sidecar writes files of these names into one directory.
    names = [of_kind(render(values, release), "ConfigMap")[0]["data"].keys() for release in ("demo", "demo-two")]
    assert not names[0] & names[1]


@pytest.mark.parametrize(
    ("query", "what"),
    [
        ('sum by (reason) (rate(coppice_orchestrator_requests_refused_total{a="b"}[5m]))', "rate"),
        ("sum(coppice_orchestrator_num_requests_waiting)", "count"),
        ("rate(coppice_orchestrator_cpu_seconds_total[5m])", "ratio"),
        ("histogram_quantile(0.5, sum by (le) (rate(coppice_verifier_pass_seconds_bucket[5m])))", "seconds"),
        ("rate(coppice_verifier_pass_seconds_sum[5m]) / rate(coppice_verifier_pass_seconds_count[5m])", "seconds"),
        ("rate(coppice_verifier_pass_rows_sum[5m]) / rate(coppice_verifier_pass_rows_count[5m])", "ratio"),
        ("coppice_verifier_certificate_expiry_timestamp_seconds - time()", "seconds"),
        ("coppice_drafter_prefix_bytes", "bytes"),
    ],
)
def test_the_quantity_of_a_query_is_known(query: str, what: str) -> None:
    assert quantity(query) == what


@pytest.mark.parametrize(
    "query",
    [
        "coppice_drafter_prefix_bytes + coppice_drafter_sequences",
        "coppice_verifier_running_sequences + rate(coppice_verifier_preemptions_total[5m])",
        "rate(coppice_drafter_prefix_bytes[5m])",
    ],
)
def test_quantities_that_do_not_go_together_have_no_unit(query: str) -> None:
    with pytest.raises(ValueError, match="of"):
        quantity(query)


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
