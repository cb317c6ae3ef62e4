"""The version, in one place."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("coppice")
except PackageNotFoundError:  # running from a source tree that is not installed
    VERSION = "0+unknown"
