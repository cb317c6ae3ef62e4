"""The command line's options of TLS: what they ask for, and what they refuse before anything is started."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
import typer
from typer.testing import CliRunner

from coppice.cli.__main__ import app
from coppice.cli.options import AccessOptions
from coppice.cli.topology import tls_files
from coppice.net.tls import ChannelTls
from tests.certificates import Directory, directory

ADDRESS = "127.0.0.1:1"


@pytest.fixture
def files(tmp_path: Path) -> Directory:
    return directory(tmp_path / "tls", trustme.CA())


def test_no_option_is_plaintext() -> None:
    assert AccessOptions().channel_tls(ADDRESS) is None
    assert AccessOptions().channel_tls("") is None


def test_each_option_asks_for_tls(files: Directory) -> None:
    assert AccessOptions(tls=True).channel_tls(ADDRESS) == ChannelTls()
    assert AccessOptions(tls_ca=files.ca).channel_tls(ADDRESS) == files.anonymous()
    options = AccessOptions(tls_ca=files.ca, tls_cert=files.cert, tls_key=files.key, tls_name="a.example")
    assert options.channel_tls(ADDRESS) == files.caller("a.example")


def test_a_private_topology_has_nothing_to_speak_tls_with() -> None:
    with pytest.raises(typer.BadParameter, match="--address"):
        AccessOptions(tls=True).channel_tls("")


@pytest.mark.parametrize("command", ["generate", "conformance"])
@pytest.mark.parametrize("part", ["ca", "cert", "key"])
def test_a_file_that_cannot_be_used_is_named_by_its_option(files: Directory, command: str, part: str) -> None:
    Path(getattr(files, part)).unlink()
    given = [f"--tls-{one}={path}" for one, path in tls_files(str(files.path)).items()]
    prompt = ["--prompt", "a"] if command == "generate" else []
    result = CliRunner().invoke(app, [command, "--address", ADDRESS, *prompt, *given])
    assert result.exit_code == 2
    assert f"--tls-{part}" in result.stderr


def commands(group: Any, *names: str) -> Iterator[tuple[str, set[str]]]:
    """Every command below a group of Typer's own click, and the options that it takes."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, *names, name)
        else:
            yield " ".join((*names, name)), {option for parameter in command.params for option in parameter.opts}


def test_whatever_speaks_to_an_address_can_speak_tls_and_show_a_token() -> None:
    every = dict(commands(typer.main.get_command(app)))
    assert "bench overload" in every
    speaking = {name: options for name, options in every.items() if "--address" in options}
    assert {"generate", "conformance"} <= speaking.keys()
    for name, options in speaking.items():
        missing = {"--token", "--tls", "--tls-ca", "--tls-cert", "--tls-key", "--tls-name"} - options
        assert not missing, f"coppice {name} lacks {sorted(missing)}"


def test_up_refuses_a_directory_that_lacks_a_file(files: Directory) -> None:
    Path(files.key).unlink()
    result = CliRunner().invoke(app, ["up", "--tls", str(files.path)])
    assert result.exit_code == 2
    assert "key cannot be read" in " ".join(result.stderr.split())
