"""Errors of commands: here alone each becomes one line on stderr, with what to do, and an exit code.

1: something is not there, or has failed. 2: the command or a setting has to change. 130: Ctrl-C.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from typing import Any, NoReturn

import grpc
import typer
from typer.core import TyperGroup

from coppice.checkpoints.writing import NO_PERMISSION, NO_SPACE
from coppice.client import RequestFailedError
from coppice.core.errors import CoppiceError, IncompatibleError
from coppice.settings import ConfigError

FAILED, WRONG, INTERRUPTED = 1, 2, 130
# What each extra of pyproject.toml adds that commands cannot do without.
EXTRAS = {
    "drafter": ("torch", "transformers", "safetensors", "numba", "llvmlite"),
    "gateway": ("starlette", "uvicorn", "httptools"),
    "redis": ("redis",),
    "bench": ("matplotlib", "PIL"),
    "train": ("tqdm",),
}
# What to do after a server's refusal; others say it themselves.
HINTS = {
    grpc.StatusCode.UNAVAILABLE: "does it run at that --address, and with the TLS of --tls-ca?",
    grpc.StatusCode.UNAUTHENTICATED: "give one of its tokens with --token or COPPICE_TOKEN",
}
# Of typer's own copy of click, or of click, by typer's version.
_UsageError = typer.BadParameter.__mro__[1]
_INVALID = re.compile("^Invalid value(: | for )")


class Commands(TyperGroup):
    """The command line; errors that a user can mend end it with one line, all others with a traceback."""

    def main(self, *args: Any, **extra: Any) -> NoReturn:
        """Called by typer: run a command and exit."""
        try:
            code = super().main(*args, **{**extra, "standalone_mode": False})
        except Exception as error:  # noqa: BLE001  those of the program are raised again
            code, line = explained(error)
            if line:
                typer.echo(f"coppice: {line}", err=True)
        sys.exit(code)


def explained(error: Exception) -> tuple[int, str]:
    """Exit code and line of an error; raises it again if it is one of the program."""
    match error:
        case typer.Abort():
            return FAILED, "aborted"
        case _ if isinstance(error, _UsageError):
            return WRONG, _of_usage(error)
        case ModuleNotFoundError() if extra := next((one for one, has in EXTRAS.items() if error.name in has), ""):
            return WRONG, missing_extra(extra, error.name or "")
        case IncompatibleError() | ConfigError():
            return WRONG, _line(error)
        case RequestFailedError() if hint := HINTS.get(error.code):
            return FAILED, f"{str(error).rstrip('.')}; {hint}"
        case OSError() if line := of_file(error):
            return WRONG, line
        case CoppiceError() | OSError():
            return getattr(error, "exit_code", FAILED), _line(error)
    raise error


def require_extra(extra: str, option: str | None = None) -> None:
    """Raise typer.BadParameter if a package of an extra is not installed."""
    for module in EXTRAS[extra]:
        if importlib.util.find_spec(module) is None:
            raise typer.BadParameter(missing_extra(extra, module), param_hint=option)


def missing_extra(extra: str, module: str) -> str:
    """What to say where a module of an extra is not installed."""
    return f"{module} is not installed: pip install 'coppice[{extra}]'"


def of_file(error: OSError) -> str:
    """What to say of a file or directory that cannot be used for want of space or permission; empty of other errors."""
    if error.filename is None:
        return ""
    if error.errno in NO_SPACE:
        return f"there is no space for {error.filename}: free some, or choose another directory"
    if error.errno in NO_PERMISSION:
        return f"{error.filename} cannot be used ({error.strerror}): give this user the right to, or choose another"
    return ""


def _of_usage(error: Any) -> str:
    """A wrong option or command, and whose help says more; without arguments the help itself."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return ""
    text = _INVALID.sub("", " ".join(error.format_message().split())).rstrip(".")
    if isinstance(error, typer.BadParameter) or error.ctx is None:
        return text
    return f"{text} ({error.ctx.command_path} --help)"


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
