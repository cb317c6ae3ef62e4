"""The certificates that docs/security.md tells how to make are ones that the services take."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from coppice.net.certificates import Certificates
from coppice.net.tls import ChannelTls, ServerTls

DOCS = Path(__file__).resolve().parents[3] / "docs" / "security.md"


def test_the_commands_make_what_the_services_take(tmp_path: Path) -> None:
    [commands] = re.findall(r"```bash\n(mkdir tls.*?)```", DOCS.read_text(), re.DOTALL)
    assert commands.count("openssl") == 3
    subprocess.run(["bash", "-euc", commands], cwd=tmp_path, check=True, capture_output=True)
    ca, cert, key = (str(tmp_path / "tls" / f"{part}.pem") for part in ("ca", "cert", "key"))
    for tls in (ServerTls(cert, key, ca), ChannelTls(ca, cert, key)):
        assert Certificates(tls).current().not_after_s > 0
