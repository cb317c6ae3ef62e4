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


# From which version on Kubernetes knows a profile's volumes; other profiles have none that it does not know.
SINCE = {"image-volume": "1.31"}


def knows(version: str, profile: str) -> bool:
    return version >= SINCE.get(profile, VERSIONS[0])


def invalid(manifests: list[Manifest], version: str) -> list[str]:
    """Kinds and names of manifests that another version than this one checked; raises ValidationError for others."""
    return [
        f"{manifest['kind']} {name_of(manifest)}"
        for manifest in manifests
        if manifest["kind"] not in FOREIGN
        and not kubernetes_validate.validate(manifest, version, strict=True).startswith(version)
    ]


@pytest.mark.parametrize(
    ("profile", "version"),
    [(profile, version) for profile in PROFILES for version in VERSIONS if knows(version, profile)],
)
def test_manifests_are_valid(profile: str, version: str) -> None:
    assert not invalid(rendered(profile), version)


def test_weights_from_an_image_are_a_volume_that_kubernetes_knows_from_1_31_on() -> None:
    with pytest.raises(kubernetes_validate.ValidationError, match="'image' was unexpected"):
        invalid(rendered("image-volume"), "1.30")
    for workload in of_kind(rendered("image-volume"), "StatefulSet"):
        spec = workload["spec"]["template"]["spec"]
        [volume] = [one for one in spec["volumes"] if one["name"] == "weights"]
        assert volume["image"]["reference"].startswith("registry.example.com/weights/")
        [mount] = [one for one in spec["containers"][0]["volumeMounts"] if one["name"] == "weights"]
        assert mount == {"name": "weights", "mountPath": "/weights", "readOnly": True}
        # Kubernetes fetches it with the Secrets that it fetches the pod's other images with.
        assert spec["imagePullSecrets"] == [{"name": "pull"}]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_field_that_kubernetes_does_not_know_is_found(version: str) -> None:
    manifest = copy.deepcopy(of_kind(rendered("default"), "Deployment")[0])
    [container] = manifest["spec"]["template"]["spec"]["containers"]
    container["readynessProbe"] = container.pop("readinessProbe")
    with pytest.raises(kubernetes_validate.ValidationError, match="readynessProbe"):
        kubernetes_validate.validate(manifest, version, strict=True)
