"""The file of TOKENS_FILE: read at start, and again whenever it has changed."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from coppice.net.access_token import token_digest
from coppice.settings import ConfigError
from orchestrator.api.tenants import Tenant, parse_tokens

logger = logging.getLogger(__name__)

# How long a token may be valid after it has left the file.
POLL_S = 2.0

# What tells one version of a file from another. Kubernetes replaces a mounted Secret by another link: another inode.
Version = tuple[int, int, int, int]


class TokenFile:
    """Whose token a token is. A version of the file that cannot be read is left out, and the last good one stays."""

    def __init__(self, path: Path) -> None:
        """Read the file.

        Raises:
            ConfigError: it cannot be read, or a line is wrong.
        """
        self._path = path
        self.num_loads = 1
        # Versions that were left out.
        self.num_errors = 0
        self._tenants: dict[str, Tenant] = {}
        self._version: Version | None = None
        try:
            self._version, self._tenants = self._read()
        except (OSError, ValueError) as error:
            raise ConfigError(f"TOKENS_FILE: {_reason(error)}") from error

    @property
    def num_tokens(self) -> int:
        """Tokens that are valid now."""
        return len(self._tenants)

    def tenant(self, token: str) -> Tenant | None:
        """Whose token it is; None where it is nobody's."""
        # How long a lookup takes depends on the digest, of which a caller can choose no byte: nothing to learn from it.
        return self._tenants.get(token_digest(token))

    async def follow(self) -> None:
        """Read the file again whenever it has changed, for ever."""
        while True:
            await asyncio.sleep(POLL_S)
            await self.refresh()

    async def refresh(self) -> None:
        """Read the file again if it has changed; all of it off the event loop."""
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
            logger.info("tokens were read anew: %d are valid", self.num_tokens)

    def _read(self) -> tuple[Version, dict[str, Tenant]]:
        # The version first: what changes after it is read again.
        version = _version(self._path)
        return version, parse_tokens(self._path.read_text(encoding="utf-8"))

    def _leave_out(self, version: Version | None, error: Exception) -> None:
        if version != self._version:
            self.num_errors += 1
            logger.warning("TOKENS_FILE is not read anew, the tokens of before stay: %s", _reason(error))
        self._version = version


def _version(path: Path) -> Version:
    found = path.stat()
    return found.st_mtime_ns, found.st_dev, found.st_ino, found.st_size


def _reason(error: Exception) -> str:
    # What text could not be decoded is part of that error, and may be anything.
    return "is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
