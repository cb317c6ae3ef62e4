"""`python -m tests.chart.write_profiles DIRECTORY`: a file of manifests per profile, for other tools."""

from __future__ import annotations

import sys
from pathlib import Path

import yaml

from tests.chart.rendering import PROFILES, rendered

if __name__ == "__main__":
    for profile in PROFILES:
        (Path(sys.argv[1]) / f"{profile}.yaml").write_text(yaml.safe_dump_all(rendered(profile), sort_keys=False))
