"""File of TOKENS_FILE: read at start, and again after each change."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from coppice.net.access_token import token_digest
from coppice.settings import ConfigError
from orchestrator.api.tenants import Tenant, parse_tokens

logger = logging.getLogger(__name__)

# Interval between checks: how long a token stays valid after its removal from the file.
POLL_S = 2.0

# Identity of a version of the file. Kubernetes replaces a mounted Secret by another link: another inode.
Version = tuple[int, int, int, int]


class TokenFile:
    """Tenants by token. After an unreadable version of the file the last good one stays in force."""

    def __init__(self, path: Path) -> None:
        """Read the file.

        Raises:
            ConfigError: the file cannot be read, or a line is wrong.
        """
        self._path = path
        self.num_loads = 1
        # Versions that could not be read.
        self.num_errors = 0
        self._tenants: dict[str, Tenant] = {}
        self._version: Version | None = None
        try:
            self._version, self._tenants = self._read()
        except (OSError, ValueError) as error:
            raise ConfigError(f"TOKENS_FILE: {_reason(error)}") from error

    @property
    def num_tokens(self) -> int:
        """Valid tokens."""
        return len(self._tenants)

    def tenant(self, token: str) -> Tenant | None:
        """Tenant of a token; None if it is not valid."""
        # No constant-time comparison needed: callers cannot choose the digest, so lookup times reveal nothing.
        return self._tenants.get(token_digest(token))

    async def follow(self) -> None:
        """Reload the file after each change, until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            await self.refresh()

    async def refresh(self) -> None:
        """Reload the file if it has changed; file access is off the event loop."""
        try:
            version = await asyncio.to_thread(_version, self._path)
        except OSError as error:
            self._leave_out(None, error)
            return
        if version == self._version:
            return
        try:
            self._version, self._tenants = await asyncio.to_thread(self._read)
        except (OSError, ValueError) as error:
            self._leave_out(version, error)
        else:
            self.num_loads += 1
            logger.info("tokens reloaded: %d are valid", self.num_tokens)

    def _read(self) -> tuple[Version, dict[str, Tenant]]:
        # The version before the content: a change in between is read again.
        version = _version(self._path)
        return version, parse_tokens(self._path.read_text(encoding="utf-8"))

    def _leave_out(self, version: Version | None, error: Exception) -> None:
        if version != self._version:
            self.num_errors += 1
            logger.warning("TOKENS_FILE cannot be reloaded, the previous tokens stay valid: %s", _reason(error))
        self._version = version


def _version(path: Path) -> Version:
    found = path.stat()
    return found.st_mtime_ns, found.st_dev, found.st_ino, found.st_size


def _reason(error: Exception) -> str:
    # A UnicodeDecodeError contains the bytes, which may be secret.
    return "is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
