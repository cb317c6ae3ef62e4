"""The file of tokens: what a line may say, and when it is read."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

from coppice.net.access_token import new_token, token_digest
from coppice.settings import ConfigError
from orchestrator.api.tenants import Tenant, parse_tokens
from orchestrator.api.token_file import TokenFile

ALICE, BOB = token_digest("alice's"), token_digest("bob's")


def line(tenant: str, *digests: str, **limits: object) -> str:
    return json.dumps({"tenant": tenant, "sha256": digests, **limits})


def test_a_line_is_a_tenant_with_its_tokens_and_limits() -> None:
    limits = {"weight": 3, "max_requests": 2, "requests_per_minute": 60}
    more = {"tokens_per_minute": 5000, "max_tokens": 99, "max_priority": -1}
    text = f"# ours\n\n{line('alice', ALICE, '0' * 64, **limits, **more)}\n{line('bob', BOB, admin=True)}\n"
    alice = Tenant("alice", **limits, **more, has_token=True)
    assert parse_tokens(text) == {ALICE: alice, "0" * 64: alice, BOB: Tenant("bob", admin=True, has_token=True)}


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("swordfish", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('["swordfish"]', "is no object"),
        (line("", ALICE), "tenant"),
        (line("swordfish" * 20, ALICE), "tenant"),
        (json.dumps({"tenant": 7, "sha256": [ALICE]}), "tenant"),
        (line("swordfish"), "sha256"),
        (json.dumps({"tenant": "a", "sha256": ALICE}), "sha256 must be a list"),
        (line("a", "swordfish"), "64 hexadecimal digits"),
        (line("a", ALICE.upper()), "64 hexadecimal digits"),
        (line("a", ALICE, ALICE), "twice"),
        (line("a", ALICE, swordfish=1), "has a field other than"),
        (line("a", ALICE, max_requests=0), "max_requests"),
        (line("a", ALICE, max_tokens=2**32), "max_tokens"),
        (line("a", ALICE, weight=True), "weight"),
        (line("a", ALICE, requests_per_minute=1.5), "requests_per_minute"),
        (line("a", ALICE, tokens_per_minute="swordfish"), "tokens_per_minute"),
        (line("a", ALICE, max_priority=2**31), "max_priority"),
        (line("a", ALICE, admin="swordfish"), "admin must be true or false"),
        (line("bob", ALICE), "earlier line"),
        (line("a", BOB), "another tenant's"),
    ],
)
def test_what_is_wrong_is_told_by_line_and_not_repeated(bad: str, reason: str) -> None:
    with pytest.raises(ValueError, match=rf"^line 2: .*{reason}") as caught:
        parse_tokens(f"{line('bob', BOB)}\n{bad}")
    assert "swordfish" not in str(caught.value)


def test_tokens_are_long_and_never_the_same() -> None:
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert min(map(len, tokens)) >= 43


def test_a_file_that_cannot_be_read_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="TOKENS_FILE: "):
        TokenFile(tmp_path / "none")
    for content in (b"swordfish", b"\xff\xfeswordfish"):
        (tmp_path / "bad").write_bytes(content)
        with pytest.raises(ConfigError, match="TOKENS_FILE: ") as caught:
            TokenFile(tmp_path / "bad")
        assert "swordfish" not in str(caught.value)


async def test_a_changed_file_is_read_and_a_broken_one_keeps_the_tokens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tokens"
    path.write_text(line("alice", ALICE))
    tokens = TokenFile(path)
    assert tokens.tenant("alice's") == Tenant("alice", has_token=True)
    assert tokens.tenant("bob's") is None
    await tokens.refresh()
    assert (tokens.num_loads, tokens.num_errors) == (1, 0)

    path.write_text(line("bob", BOB))
    await tokens.refresh()
    assert tokens.tenant("alice's") is None
    assert tokens.tenant("bob's") is not None

    for broken in ("swordfish", None):
        path.unlink() if broken is None else path.write_text(broken)
        caplog.clear()
        # Told once, however often it is looked at.
        for _ in range(3):
            await tokens.refresh()
        assert tokens.tenant("bob's") is not None
        [record] = caplog.records
        assert record.levelno == logging.WARNING
        assert "swordfish" not in record.getMessage()
    assert (tokens.num_loads, tokens.num_errors) == (2, 2)

    path.write_text(line("alice", ALICE))
    await tokens.refresh()
    assert tokens.tenant("alice's") is not None
    assert (tokens.num_loads, tokens.num_errors) == (3, 2)


async def test_a_secret_that_kubernetes_replaces_is_read_anew(tmp_path: Path) -> None:
    """As it does: the file is a link into a directory that is a link, which is replaced in one step."""
    for number, owner in enumerate(("alice", "bob")):
        directory = tmp_path / f"..{number}"
        directory.mkdir()
        (directory / "tokens").write_text(line(owner, ALICE))
        # The same size and time: the two differ by their inode alone.
        os.utime(directory / "tokens", (1, 1))
    (tmp_path / "..0" / "tokens").write_text(line("eve", ALICE))
    os.utime(tmp_path / "..0" / "tokens", (1, 1))
    (tmp_path / "..data").symlink_to("..0")
    (tmp_path / "tokens").symlink_to("..data/tokens")
    tokens = TokenFile(tmp_path / "tokens")
    assert tokens.tenant("alice's") == Tenant("eve", has_token=True)
    (tmp_path / "..new").symlink_to("..1")
    (tmp_path / "..new").rename(tmp_path / "..data")
    await tokens.refresh()
    assert tokens.tenant("alice's") == Tenant("bob", has_token=True)
