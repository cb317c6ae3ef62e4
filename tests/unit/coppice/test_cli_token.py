"""`coppice token new`, and the token that commands send."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from coppice.cli.__main__ import app
from coppice.net.access_token import new_token, token_digest
from orchestrator.api.tenants import Tenant, parse_tokens

LIMITS = {
    "weight": 2,
    "max_requests": 3,
    "requests_per_minute": 4,
    "tokens_per_minute": 5,
    "max_tokens": 6,
    "max_priority": -7,
}


def test_the_line_is_one_that_the_server_reads_and_has_no_token() -> None:
    options = [part for name, value in LIMITS.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    result = CliRunner().invoke(app, ["token", "new", "--tenant", "alice", *options])
    assert result.exit_code == 0
    token = result.stderr.strip()
    assert token not in result.stdout
    assert parse_tokens(result.stdout) == {token_digest(token): Tenant("alice", has_token=True, **LIMITS)}
    result = CliRunner().invoke(app, ["token", "new", "--tenant", "alice", "--admin"])
    assert [tenant.admin for tenant in parse_tokens(result.stdout).values()] == [True]


def test_a_tenant_needs_a_name() -> None:
    assert CliRunner().invoke(app, ["token", "new", "--tenant", ""]).exit_code == 2


@pytest.mark.parametrize("option", ["--weight", "--max-requests", "--max-tokens", "--max-priority"])
def test_no_token_is_made_that_the_file_could_not_hold(option: str) -> None:
    ended = CliRunner().invoke(app, ["token", "new", "--tenant", "a", option, str(2**32)])
    assert ended.exit_code == 2
    assert f"{option[2:].replace('-', '_')} must be a whole number" in ended.output
    assert "sha256" not in ended.output


@pytest.mark.parametrize("command", ["generate", "conformance", "top"])
def test_a_token_of_the_environment_shows_in_no_help(command: str) -> None:
    secret = new_token()
    result = CliRunner().invoke(app, [command, "--help"], env={"COPPICE_TOKEN": secret, "COLUMNS": "200"})
    assert "COPPICE_TOKEN" in result.output
    assert secret not in result.output


@pytest.mark.parametrize("way", ["option", "environment"])
def test_generate_sends_the_token(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []

    class Recorder:
        def __init__(self, address: str, token: str, tls: object) -> None:
            sent.append((address, token))
            raise RuntimeError("no server here")

    monkeypatch.setattr("coppice.cli.generate.Client", Recorder)
    arguments = ["generate", "--address", "127.0.0.1:1", "--prompt", "a"]
    arguments += ["--token", "mine"] if way == "option" else []
    CliRunner().invoke(app, arguments, env={"COPPICE_TOKEN": "mine"} if way == "environment" else {})
    assert sent == [("127.0.0.1:1", "mine")]
