"""Several models in one release: each as it would be in a release of its own, and apart from the others."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chart.rendering import RELEASE, Manifest, helm, name_of, notes_of, of_kind, render
from tests.chart.test_kubernetes import VERSIONS, invalid
from tests.chart.test_network import edges

LABEL = "coppice/model"
VALUES = yaml.safe_load((Path(__file__).parent / "profiles" / "models.yaml").read_text())


@cache
def together() -> list[Manifest]:
    return render(VALUES)


def merged(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """`own` over `base` as Helm merges values."""
    found = copy.deepcopy(base)
    for key, value in own.items():
        found[key] = merged(found[key], value) if isinstance(value, dict) and key in found else value
    return found


def alone(number: int) -> list[Manifest]:
    """What a release of a model's own consists of."""
    values = {key: value for key, value in VALUES.items() if key != "models"}
    model = dict(VALUES["models"][number])
    values["fullnameOverride"] = f"{RELEASE}-{model.pop('name')}"
    return render(merged(values, model))


def without_model(part: Any) -> Any:
    """A manifest without the label that says whose it is."""
    if isinstance(part, dict):
        return {key: without_model(value) for key, value in part.items() if key != LABEL}
    return [without_model(one) for one in part] if isinstance(part, list) else part


def by_name(manifests: list[Manifest]) -> dict[tuple[str, str], Manifest]:
    found = {(one["kind"], name_of(one)): one for one in manifests}
    assert len(found) == len(manifests)
    return found


def test_each_model_is_what_it_is_in_a_release_of_its_own() -> None:
    apart: dict[tuple[str, str], Manifest] = {}
    for number in range(2):
        apart |= by_name([one for one in alone(number) if not name_of(one).endswith("-dashboard")])
    found = by_name(together())
    dashboard = found.pop(("ConfigMap", f"{RELEASE}-dashboard"))
    assert dashboard["data"]
    assert found.keys() == apart.keys()
    for key, manifest in found.items():
        assert without_model(manifest) == apart[key], key


def test_each_selector_finds_pods_of_one_model() -> None:
    selectors = []

    def collect(part: Any) -> None:
        if isinstance(part, dict):
            selectors.extend(part[key] for key in ("matchLabels",) if key in part)
            for value in part.values():
                collect(value)
        elif isinstance(part, list):
            for value in part:
                collect(value)

    for manifest in together():
        collect(manifest)
    selectors += [one["spec"]["selector"] for one in of_kind(together(), "Service")]
    ours = [one for one in selectors if "app.kubernetes.io/instance" in one]
    assert len(ours) > 20
    assert {one.get(LABEL) for one in ours} == {"code", "chat"}


def test_no_model_reaches_the_back_ends_of_another() -> None:
    by_model = {
        name: [one for one in together() if one["metadata"]["labels"].get(LABEL) == name] for name in ("code", "chat")
    }
    # As in a release of its own; labels of the other model's pods fit no rule.
    for number, (name, own) in enumerate(by_model.items()):
        assert edges(own) == edges(alone(number)), name
        for policy in of_kind(own, "NetworkPolicy"):
            assert policy["spec"]["podSelector"]["matchLabels"][LABEL] == name


@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_are_valid(version: str) -> None:
    assert not invalid(together(), version)


def test_notes_tell_of_each_model() -> None:
    text = notes_of(VALUES)
    assert "deployment/demo-code-orchestrator" in text
    assert "deployment/demo-chat-orchestrator" in text


@pytest.mark.parametrize(
    ("models", "complaint"),
    [
        ([{"name": "a"}, {"name": "a"}], "two entries named a"),
        ([{"verifier": {}}], "name"),
        ([{"name": "with-hyphen"}], "name"),
        ([{"name": "a", "tokens": {}}], "tokens"),
        ([{"name": "a", "verifier": {"config": {"MODLE": "/x"}}}], "MODLE"),
    ],
)
def test_mistakes_are_refused(models: list[Any], complaint: str) -> None:
    with pytest.raises(helm.HelmError, match=complaint):
        render({"models": models})


OUTSIDE = {
    "gateway": {"enabled": True},
    "routes": {"grpc": {"parentRefs": [{"name": "entrance"}]}, "http": {"parentRefs": [{"name": "entrance"}]}},
    "ingress": {"hosts": ["llm.example.com"]},
}


SAME = [{"name": "entrance"}]
BOTH = [*SAME, {"name": "side-entrance"}]


@pytest.mark.parametrize(
    ("first", "second", "complaint"),
    [
        ({"ingress": {"enabled": True}}, {}, "ingress of model a and ingress of model b both have llm.example.com/v1"),
        ({"ingress": {"enabled": True}}, {"ingress": {"paths": ["/v1/"]}}, "both have llm.example.com/v1"),
        (
            {"routes": {"http": {"enabled": True}}},
            {},
            "http of model a and routes.http of model b both have all",
        ),
        ({"routes": {"grpc": {"enabled": True}}}, {}, "both have all hosts"),
        ({"routes": {"grpc": {"enabled": True}}}, {"routes": {"grpc": {"parentRefs": BOTH}}}, "both have all hosts"),
    ],
)
def test_two_models_have_no_address_in_common(first: dict[str, Any], second: dict[str, Any], complaint: str) -> None:
    models = [{"name": "a", **first}, {"name": "b", **merged(first, second)}]
    with pytest.raises(helm.HelmError, match=complaint):
        render({**OUTSIDE, "models": models})


def test_an_http_route_and_a_grpc_route_have_no_host_in_common() -> None:
    routes = {"grpc": {"enabled": True, "parentRefs": SAME}, "http": {"enabled": True, "parentRefs": SAME}}
    with pytest.raises(helm.HelmError, match=r"routes\.http and routes\.grpc both have all hosts"):
        render({"gateway": {"enabled": True}, "routes": routes})


def test_hosts_or_gateways_of_their_own_tell_models_apart() -> None:
    first = {"ingress": {"enabled": True, "hosts": ["a.example.com"]}, "routes": {"grpc": {"enabled": True}}}
    elsewhere = {"grpc": {"enabled": True, "parentRefs": [{"name": "side-entrance"}]}}
    second = {"ingress": {"enabled": True}, "routes": elsewhere}
    manifests = render({**OUTSIDE, "models": [{"name": "a", **first}, {"name": "b", **second}]})
    assert len(of_kind(manifests, "Ingress")) == len(of_kind(manifests, "GRPCRoute")) == 2


def test_the_longest_names_still_fit() -> None:
    drafter = {"name": "d" * 15, "kind": "small-lm", "config": {"MODEL": "/models/small-lm"}}
    manifests = render({"fullnameOverride": "n" * 12, "models": [{"name": "m" * 15, "drafters": [drafter]}]})
    assert all(len(name_of(manifest)) <= 63 for manifest in manifests)
    assert max(len(name_of(one)) for one in of_kind(manifests, "StatefulSet")) == 63 - 11
