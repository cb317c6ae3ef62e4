"""Two releases in one namespace, one named like the beginning of the other: no name, selector or query is of both."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from tests.chart.rendering import (
    NAMESPACE,
    Manifest,
    component,
    helm,
    name_of,
    of_kind,
    pods,
    render,
    selects,
    services_of_ours,
    values_of,
)
from tests.chart.test_monitoring import PANELS, queries_of

RELEASES = ("demo", "demo-two")
PAIRS = [RELEASES, RELEASES[::-1]]
every_pair = pytest.mark.parametrize(("one", "other"), PAIRS)
# Labels by which the chart's own selectors tell pods apart.
INSTANCE = "app.kubernetes.io/instance"
OURS = "app.kubernetes.io/name"
# What a query selects by, in PromQL.
SELECTOR = re.compile(r"(coppice_\w+)\{([^}]*)\}")
MATCHER = re.compile(r'(\w+)(=~|=)"([^"]*)"')


@cache
def installed(release: str) -> list[Manifest]:
    """Everything that there may be, with TLS, under a release's own name."""
    values = values_of("everything")
    issuers = {part: {"issuerRef": {"name": "ours"}} for part in ("public", "internal")}
    values |= {"fullnameOverride": "", "tls": {"enabled": True, **issuers}}
    values["metrics"]["tls"] = {"enabled": True}
    return render(values, release)


def selectors(part: Any) -> Iterator[dict[str, str]]:
    """Labels that manifests select pods or Services by, without what values say."""
    if isinstance(part, dict):
        for key, value in part.items():
            if key in ("matchLabels", "selector") and isinstance(value, dict) and OURS in value:
                yield value
            else:
                yield from selectors(value)
    elif isinstance(part, list):
        for value in part:
            yield from selectors(value)


@every_pair
def test_no_object_of_one_release_is_in_the_other(one: str, other: str) -> None:
    names = [{(manifest["kind"], name_of(manifest)) for manifest in installed(name)} for name in (one, other)]
    assert len(names[0]) == len(installed(one)) > 30
    assert not names[0] & names[1]


@every_pair
def test_no_selector_of_one_release_matches_pods_or_services_of_the_other(one: str, other: str) -> None:
    found = list(selectors(installed(one)))
    own, others = (
        [labels for _, labels, _ in pods(installed(name))]
        + [service["metadata"]["labels"] for service in of_kind(installed(name), "Service")]
        for name in (one, other)
    )
    assert len(found) > 50
    for selector in found:
        assert any(selects(selector, labels) for labels in own), selector
        assert not any(selects(selector, labels) for labels in others), selector


def selected(selector: str, release: str) -> set[str]:
    """Components whose Services' targets a query selects, as Prometheus does: names match as a whole."""
    matchers = {label: (how, value) for label, how, value in MATCHER.findall(selector)}
    assert matchers.pop("namespace") == ("=", NAMESPACE)
    how, value = matchers.pop("service")
    pattern = re.compile(value if how == "=~" else re.escape(value))
    return {component(one) for one in of_kind(installed(release), "Service") if pattern.fullmatch(name_of(one))}


def serve(metric: str, parts: set[str]) -> set[str]:
    """Of these components, those that serve a metric."""
    return {part for part in parts if metric.startswith(f"coppice_{part.partition('-')[0]}_")}


def every_part() -> set[str]:
    return {component(one) for one in services_of_ours(installed("demo"))}


@every_pair
def test_alerts_of_one_release_do_not_select_the_other(one: str, other: str) -> None:
    [rule] = of_kind(installed(one), "PrometheusRule")
    queries = [alert["expr"] for group in rule["spec"]["groups"] for alert in group["rules"]]
    found = [each for query in queries for each in SELECTOR.findall(query)]
    assert len(found) > 10
    for metric, selector in found:
        # All that serve it, and nobody of the other release.
        assert serve(metric, selected(selector, one)) == serve(metric, every_part()) != set(), metric
        assert not selected(selector, other), metric


@every_pair
def test_a_dashboard_shows_one_release(one: str, other: str) -> None:
    queries = " ".join(query for panel in PANELS for query in queries_of(panel))
    found = SELECTOR.findall(queries.replace("$namespace", NAMESPACE).replace("$release", one))
    assert len(found) > 50
    for metric, selector in found:
        assert selected(selector, one) == serve(metric, every_part()) != set(), metric
        assert not selected(selector, other), metric


LONG = "inference-for-the-company-of"
INSTEAD = "set fullnameOverride"


@pytest.mark.parametrize("release", [f"{LONG}-one", f"{LONG}-two"])
def test_names_that_would_be_cut_to_one_are_refused(release: str) -> None:
    with pytest.raises(helm.HelmError, match=f"{release}.*at most 28: {INSTEAD}"):
        render({}, release)
    assert {INSTANCE: release}.items() <= render({"fullnameOverride": LONG}, release)[0]["metadata"]["labels"].items()


def test_a_model_s_name_counts_too() -> None:
    release = LONG[:20]
    assert render({"models": [{"name": "sevenab"}]}, release)
    with pytest.raises(helm.HelmError, match=f"{release}-eightabc.*29 characters.*{INSTEAD}"):
        render({"models": [{"name": "eightabc"}]}, release)


@pytest.mark.parametrize("release", ["demo-drafter", "demo-drafter-small"])
def test_a_name_like_that_of_another_release_s_drafter_is_refused(release: str) -> None:
    with pytest.raises(helm.HelmError, match=INSTEAD):
        render({}, release)
    assert render({}, "drafter-demo")
    assert render({}, "demo-drafters")
