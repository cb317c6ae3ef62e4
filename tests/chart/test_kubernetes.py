"""What is rendered fits Kubernetes' own schemas, without a field that they do not know. No API server has seen it."""

from __future__ import annotations

import copy

import pytest

from tests.chart.rendering import PROFILES, Manifest, name_of, of_kind, rendered

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="the extra `chart` is not installed")

VERSIONS = tuple(f"1.{minor}" for minor in range(30, 38))
# Of the Prometheus Operator, the Gateway API, cert-manager and KEDA, whose schemas are not Kubernetes' own: looked
# at in test_monitoring.py, test_routes.py, test_certificates.py and test_scaling.py.
FOREIGN = ("ServiceMonitor", "PrometheusRule", "GRPCRoute", "HTTPRoute", "Certificate", "ScaledObject")


def invalid(manifests: list[Manifest], version: str) -> list[str]:
    """Kinds and names of manifests that another version than this one checked; raises ValidationError for others."""
    return [
        f"{manifest['kind']} {name_of(manifest)}"
        for manifest in manifests
        if manifest["kind"] not in FOREIGN
        and not kubernetes_validate.validate(manifest, version, strict=True).startswith(version)
    ]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("profile", PROFILES)
def test_manifests_are_valid(profile: str, version: str) -> None:
    assert not invalid(rendered(profile), version)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_field_that_kubernetes_does_not_know_is_found(version: str) -> None:
    manifest = copy.deepcopy(of_kind(rendered("default"), "Deployment")[0])
    [container] = manifest["spec"]["template"]["spec"]["containers"]
    container["readynessProbe"] = container.pop("readinessProbe")
    with pytest.raises(kubernetes_validate.ValidationError, match="readynessProbe"):
        kubernetes_validate.validate(manifest, version, strict=True)
