"""TLS in the chart: certificates for the names that are called, mounted where the services look for them."""

from __future__ import annotations

from datetime import timedelta
from pathlib import PurePosixPath
from typing import Any

import pytest

from tests.chart.rendering import (
    ONE_MODEL,
    PROFILES,
    Manifest,
    component,
    container,
    environment,
    name_of,
    notes,
    of_kind,
    rendered,
    services_of_ours,
)
from tests.chart.test_references import addresses

SECURED = ("tls", "mutual")
# What cert-manager writes into a Secret.
KEYS = {"tls.crt", "tls.key", "ca.crt"}
FILES = {"TLS_CERT": "tls.crt", "TLS_KEY": "tls.key", "TLS_CLIENT_CA": "ca.crt", "TLS_CA": "ca.crt"}

secured = pytest.mark.parametrize("profile", SECURED)


def of_component(profile: str, kind: str) -> list[Manifest]:
    return [one for one in services_of_ours(rendered(profile)) if component(one).partition("-")[0] == kind]


def secret_behind(workload: Manifest, path: str) -> tuple[str, str]:
    """The Secret, and the key in it, that a file of a workload's container comes from."""
    directory, name = str(PurePosixPath(path).parent), PurePosixPath(path).name
    [mount] = [one for one in container(workload)["volumeMounts"] if one["mountPath"] == directory]
    assert mount["readOnly"]
    # With it the file would stay as it was when the pod started.
    assert "subPath" not in mount
    volumes = workload["spec"]["template"]["spec"]["volumes"]
    [volume] = [one for one in volumes if one["name"] == mount["name"]]
    assert name in KEYS
    return volume["secret"]["secretName"], name


def certificates(profile: str) -> dict[str, dict[str, Any]]:
    """What cert-manager is asked for, by the Secret that it writes."""
    return {one["spec"]["secretName"]: one["spec"] for one in of_kind(rendered(profile), "Certificate")}


@pytest.mark.parametrize("profile", [profile for profile in PROFILES if profile not in SECURED])
def test_without_tls_there_is_nothing_of_it(profile: str) -> None:
    assert not of_kind(rendered(profile), "Certificate")
    for workload in services_of_ours(rendered(profile)):
        assert not [name for name in environment(workload) if "TLS" in name or name == "HEALTH_PORT"]
        assert not [one for one in container(workload)["volumeMounts"] if one["mountPath"].startswith("/tls")]


@secured
def test_each_file_that_a_service_reads_is_that_key_of_a_secret(profile: str) -> None:
    for workload in services_of_ours(rendered(profile)):
        found = {name: path for name, path in environment(workload).items() if "TLS_" in name and path != "on"}
        assert {"TLS_CERT", "TLS_KEY"} <= found.keys(), name_of(workload)
        for name, path in found.items():
            _, key = secret_behind(workload, path or "")
            assert key == FILES[name.removeprefix("BACKEND_")], name_of(workload)


@secured
def test_back_ends_ask_for_certificates_and_orchestrators_have_one(profile: str) -> None:
    for workload in (*of_component(profile, "verifier"), *of_component(profile, "drafter")):
        assert "TLS_CLIENT_CA" in environment(workload)
    [orchestrator] = of_component(profile, "orchestrator")
    assert {"BACKEND_TLS_CA", "BACKEND_TLS_CERT", "BACKEND_TLS_KEY"} <= environment(orchestrator).keys()
    assert ("TLS_CLIENT_CA" in environment(orchestrator)) == (profile == "mutual")
    # What clients see is never what opens the back ends.
    public, _ = secret_behind(orchestrator, environment(orchestrator)["TLS_KEY"] or "")
    internal, _ = secret_behind(orchestrator, environment(orchestrator)["BACKEND_TLS_KEY"] or "")
    assert public != internal


def test_certificates_have_the_names_that_are_called() -> None:
    made = certificates("tls")
    for kind, host, _ in addresses("tls"):
        [names] = [
            set(made[secret_behind(one, environment(one)["TLS_CERT"] or "")[0]]["dnsNames"])
            for one in of_component("tls", kind)
            if host.partition(".")[2] == one["spec"]["serviceName"]
        ]
        assert host in names
    [orchestrator] = of_component("tls", "orchestrator")
    public = made[secret_behind(orchestrator, environment(orchestrator)["TLS_CERT"] or "")[0]]
    services = {name_of(one) for one in of_kind(rendered("tls"), "Service") if component(one) == "orchestrator"}
    assert services <= set(public["dnsNames"])


def test_certificates_are_good_for_their_use_alone() -> None:
    made = certificates("tls")
    [orchestrator] = of_component("tls", "orchestrator")
    uses = {}
    for workload in services_of_ours(rendered("tls")):
        for variable in ("TLS_CERT", "BACKEND_TLS_CERT"):
            if path := environment(workload).get(variable):
                name, _ = secret_behind(workload, path)
                uses[name] = "client auth" if variable.startswith("BACKEND") else "server auth"
                # The issuer of what clients see is not trusted by back ends.
                front = workload is orchestrator and variable == "TLS_CERT"
                assert made[name]["issuerRef"]["name"] == ("public-ca" if front else "coppice-ca")
    assert {name: one["usages"] for name, one in made.items()} == {
        name: ["digital signature", use] for name, use in uses.items()
    }


def hours(text: str) -> timedelta:
    return timedelta(hours=int(text.removesuffix("h")))


def test_certificates_are_renewed_long_before_they_end() -> None:
    for one in certificates("tls").values():
        assert timedelta(days=7) <= hours(one["renewBefore"]) < hours(one["duration"]) / 2
        assert one["privateKey"]["rotationPolicy"] == "Always"


def test_secrets_that_exist_are_used_instead() -> None:
    assert not certificates("mutual")
    names = set()
    for workload in services_of_ours(rendered("mutual")):
        names |= {
            one["secret"]["secretName"] for one in workload["spec"]["template"]["spec"]["volumes"] if "secret" in one
        }
    assert names == {"front-door", "back-ends"}


@secured
def test_what_helm_test_runs_trusts_the_front_door(profile: str) -> None:
    [pod] = of_kind(rendered(profile), "Pod")
    [one] = pod["spec"]["containers"]
    [mount] = [mount for mount in one["volumeMounts"] if mount["mountPath"] == "/tls/public"]
    [volume] = [volume for volume in pod["spec"]["volumes"] if volume["name"] == mount["name"]]
    given = dict(part.split("=", 1) for part in one["args"] if part.startswith("--tls"))
    mounted = {f"/tls/public/{item['path']}" for item in volume["secret"]["items"]}
    assert set(given.values()) == mounted
    assert given["--tls-ca"] == "/tls/public/ca.crt"
    assert ("--tls-key" in given) == (profile == "mutual")


@pytest.mark.parametrize("profile", PROFILES)
def test_notes_say_whether_connections_are_encrypted(profile: str) -> None:
    text = notes(profile)
    assert ("Connections are not encrypted" in text) == (profile not in SECURED)
    assert ("Connections are encrypted" in text) == (profile in SECURED)
    assert ("--tls-ca" in text) == (profile in SECURED)


@pytest.mark.parametrize("profile", ONE_MODEL)
def test_notes_say_what_clients_are_asked_for(profile: str) -> None:
    [orchestrator] = of_component(profile, "orchestrator")
    given, text = environment(orchestrator), " ".join(notes(profile).split())
    tokens, shown = "TOKENS_FILE" in given, "TLS_CLIENT_CA" in given
    assert ("COPPICE_TOKEN=... coppice generate" in text) == tokens
    assert ("asked for a token" in text) == tokens
    assert ("asked for a certificate" in text) == (shown and not tokens)
    assert ("not asked who they are" in text) == (not shown and not tokens)


def test_certificates_have_no_field_that_cert_manager_does_not_know() -> None:
    known = {"secretName", "issuerRef", "duration", "renewBefore", "privateKey", "usages", "dnsNames"}
    for manifest in of_kind(rendered("tls"), "Certificate"):
        assert manifest["apiVersion"] == "cert-manager.io/v1"
        assert manifest["spec"].keys() == known
