"""llama.cpp's own server, through the package `xllamacpp`: `python -m coppice.lab.bench.peers.llama_cpp OPTIONS`.

OPTIONS are JSON: `model`, a GGUF file; `threads`; `context`, tokens of one request; `parallel`, requests at once;
`speculation`, one of its types (`ngram-simple`, …), or `draft`, a draft model's GGUF file. Prebuilt wheels may lack
vector instructions of this machine; the line that says where it serves has what the build says of itself.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import signal
import sys
from collections.abc import Mapping
from typing import Any

from coppice.cli.tied_process import READY

_DRAFT_MODEL = "draft_simple"


def main(options: Mapping[str, Any]) -> None:
    """Serve until a signal ends the process."""
    llama: Any = importlib.import_module("xllamacpp")
    params = llama.CommonParams()
    params.model.path = options["model"]
    params.n_parallel = options.get("parallel", 1)
    params.n_ctx = options["context"] * params.n_parallel
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options["threads"]
    # Its log goes to standard output otherwise.
    params.verbosity = -1
    settings = speculate(llama, params.speculative, options)
    server = llama.Server(params)
    system = " ".join(llama.get_system_info().replace("|", " ").split())
    note = f"xllamacpp {importlib.metadata.version('xllamacpp')}, {options['threads']} threads{settings}, {system}"
    sys.stdout.write(f"{READY}{server.listening_address} {note}\n")
    sys.stdout.flush()
    # The server's threads serve; this one waits for the signal that ends the process.
    signal.pause()


def speculate(llama: Any, speculative: Any, options: Mapping[str, Any]) -> str:
    """Set speculation up as the options ask for it, and say how; empty without."""
    kind = options.get("speculation", "").replace("-", "_")
    if draft := options.get("draft"):
        speculative.draft.mparams.path, kind = draft, _DRAFT_MODEL
        speculative.draft.cpuparams.n_threads = speculative.draft.cpuparams_batch.n_threads = options["threads"]
    if not kind:
        return ""
    speculative.types = [getattr(llama.common_speculative_type, f"COMMON_SPECULATIVE_TYPE_{kind.upper()}")]
    own = speculative.draft if kind == _DRAFT_MODEL else getattr(speculative, kind)
    values = {name: getattr(own, name) for name in dir(own) if not name.startswith("_")}
    numbers = [f"{name}={value}" for name, value in values.items() if isinstance(value, int | float)]
    return ", ".join(["", kind.replace("_", "-"), *numbers])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
