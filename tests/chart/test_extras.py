"""What people add to pods: variables, volumes, containers and labels, to every workload alike."""

from __future__ import annotations

from typing import Any

from tests.chart.rendering import render, services_of_ours

OWN = {
    "podLabels": {"example.com/team": "serving"},
    "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
    "envFrom": [{"secretRef": {"name": "extra"}}],
    "extraVolumes": [{"name": "own", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "own", "mountPath": "/own"}],
    "extraContainers": [{"name": "beside", "image": "example.com/beside:1"}],
    "initContainers": [{"name": "before", "image": "example.com/before:1"}],
}


def test_each_workload_has_what_is_added() -> None:
    values: dict[str, Any] = dict.fromkeys(("orchestrator", "verifier", "drafterDefaults"), OWN)
    workloads = services_of_ours(render({**values, "gateway": {"enabled": True, **OWN}}))
    assert len(workloads) == 4
    for workload in workloads:
        template = workload["spec"]["template"]
        spec, (own, beside) = template["spec"], template["spec"]["containers"]
        assert OWN["podLabels"].items() <= template["metadata"]["labels"].items()
        assert OWN["extraEnv"][0] in own["env"]
        assert own["envFrom"] == OWN["envFrom"]
        assert OWN["extraVolumeMounts"][0] in own["volumeMounts"]
        assert OWN["extraVolumes"][0] in spec["volumes"]
        assert [beside] == OWN["extraContainers"]
        assert spec["initContainers"] == OWN["initContainers"]


def test_an_init_container_can_fill_the_volume_of_the_weights() -> None:
    fetch = {"name": "fetch", "image": "example.com/fetch:1", "volumeMounts": [{"name": "weights", "mountPath": "/w"}]}
    values = {"weights": {"emptyDir": {"sizeLimit": "20Gi"}}, "initContainers": [fetch]}
    for workload in services_of_ours(render({"verifier": values, "drafterDefaults": values})):
        spec = workload["spec"]["template"]["spec"]
        if spec.get("initContainers"):
            assert {"name": "weights", "emptyDir": {"sizeLimit": "20Gi"}} in spec["volumes"]
            assert {"name": "weights", "mountPath": "/weights", "readOnly": True} in spec["containers"][0][
                "volumeMounts"
            ]
