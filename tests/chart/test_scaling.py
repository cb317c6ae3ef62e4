"""Scaling with KEDA: back ends apart from each other, by metrics that are served."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.chart.quantities import family
from tests.chart.rendering import component, helm, name_of, of_kind, render, rendered, services_of_ours

METRICS = (Path(__file__).resolve().parents[2] / "docs" / "metrics.md").read_text()


def scaled(profile: str, *kinds: str) -> dict[str, Any]:
    """Scalers of a profile by the name of what they scale."""
    return {one["spec"]["scaleTargetRef"]["name"]: one for one in of_kind(rendered(profile), *kinds)}


def test_keda_scales_back_ends_apart_from_each_other_and_by_their_own_metrics() -> None:
    by_name = {name_of(one): component(one) for one in services_of_ours(rendered("keda"))}
    found = scaled("keda", "ScaledObject")
    assert {by_name[name].partition("-")[0] for name in found} == {"verifier", "drafter"}
    assert not scaled("keda", "HorizontalPodAutoscaler")
    queries: dict[str, set[str]] = {}
    for name, one in found.items():
        for trigger in one["spec"]["triggers"]:
            assert trigger["type"] == "prometheus"
            # A share is the same for however many replicas: it is no sum to be divided among them.
            is_share = "/" in trigger["metadata"]["query"] or "avg(" in trigger["metadata"]["query"]
            assert trigger.get("metricType", "AverageValue") == ("Value" if is_share else "AverageValue")
            assert float(trigger["metadata"]["threshold"]) > 0
            asked = set(re.findall(r"coppice_\w+", trigger["metadata"]["query"]))
            assert asked
            for metric in asked:
                assert f"| `{family(metric)}` |" in METRICS, metric
            queries.setdefault(by_name[name].partition("-")[0], set()).update(asked)
    assert not queries["verifier"] & queries["drafter"]


def test_each_query_asks_for_one_release_by_the_service_that_is_scraped() -> None:
    services = {name_of(one): component(one) for one in of_kind(rendered("keda"), "Service")}
    queries = [
        trigger["metadata"]["query"]
        for one in scaled("keda", "ScaledObject").values()
        for trigger in one["spec"]["triggers"]
    ]
    assert queries
    for query in queries:
        selectors = re.findall(r"coppice_\w+(?:\{([^}]*)\})?", query)
        assert selectors
        for selector in selectors:
            labels = dict(re.findall(r'(\w+)="([^"]+)"', selector))
            # Every metric that is asked for is a verifier's; the release that is rendered here has the file's name.
            assert services.get(labels.get("service", "")) == "verifier", query
            assert labels.get("namespace"), query


def test_the_late_drafts_that_are_asked_for_are_counted_so() -> None:
    source = (Path(__file__).resolve().parents[2] / "verifier_svc" / "metrics.py").read_text()
    assert '"late": drafts.late' in source
    [drafter] = [one for name, one in scaled("keda", "ScaledObject").items() if "drafter" in name or "small" in name]
    assert any('arrival="late"' in trigger["metadata"]["query"] for trigger in drafter["spec"]["triggers"])


BACKWARDS = {"enabled": True, "minReplicas": 3, "maxReplicas": 2}
DRAFTER = {"name": "small", "kind": "small-lm", "config": {"MODEL": "/models/small-lm"}, "autoscaling": BACKWARDS}


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"orchestrator": {"autoscaling": BACKWARDS}}, "orchestrator"),
        ({"gateway": {"enabled": True, "autoscaling": BACKWARDS}}, "gateway"),
        ({"verifier": {"autoscaling": BACKWARDS}}, "verifier"),
        ({"verifier": {"autoscaling": {**BACKWARDS, "triggers": [{"type": "cpu", "metadata": {}}]}}}, "verifier"),
        ({"drafters": [DRAFTER]}, "drafter small"),
    ],
)
def test_a_scaler_with_its_bounds_the_wrong_way_round_is_refused(values: dict[str, Any], what: str) -> None:
    with pytest.raises(helm.HelmError, match=rf"{what}\.autoscaling has minReplicas 3 above maxReplicas 2"):
        render(values)
