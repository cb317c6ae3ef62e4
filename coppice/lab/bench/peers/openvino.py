"""OpenVINO GenAI as a server: `python -m coppice.lab.bench.peers.openvino OPTIONS`.

OPTIONS are JSON: `model`, a GGUF file, which it reads itself; `threads`; `speculation`, `prompt-lookup` or nothing.
One request at a time; messages are llama.cpp's.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import sys
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from coppice.cli.tied_process import READY

# Prompts are read in one pass, as they are where it has no scheduler's settings.
_NO_CHUNKS = 1 << 31
# As in its own sample of prompt lookup.
_LOOKUP = {"num_assistant_tokens": 5, "max_ngram_size": 3}


class Pipeline:
    """The model on the CPU; its numbers are the library's choice."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        genai: Any = importlib.import_module("openvino_genai")
        tensors: Any = importlib.import_module("openvino")
        self._genai, self._tensor = genai, tensors.Tensor
        self._numpy: Any = importlib.import_module("numpy")
        self._lookup = _LOOKUP if options.get("speculation") else {}
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": options["threads"]}
        if self._lookup:
            properties["prompt_lookup"] = True
        # As by default, but that nothing is known from earlier requests.
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching, scheduler.max_num_batched_tokens = False, _NO_CHUNKS
        self._pipeline = genai.LLMPipeline(options["model"], "CPU", scheduler_config=scheduler, **properties)
        said = [f"{name}={value}" for name, value in (properties | self._lookup).items()]
        said.append("enable_prefix_caching=False")
        self.note = ", ".join([f"openvino-genai {importlib.metadata.version('openvino-genai')}", *said])

    def complete(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a request, in llama.cpp's words."""
        config = self._genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = asked["n_predict"]
        config.ignore_eos = True
        config.do_sample = asked["temperature"] > 0
        if config.do_sample:
            config.temperature, config.rng_seed, config.top_p = asked["temperature"], asked["seed"], 1.0
        for name, value in self._lookup.items():
            setattr(config, name, value)
        prompt = self._numpy.array([asked["prompt"]], dtype=self._numpy.int64)
        ids, mask = self._tensor(prompt), self._tensor(self._numpy.ones_like(prompt))
        result = self._pipeline.generate(self._genai.TokenizedInputs(ids, mask), config)
        metrics = result.perf_metrics
        first, whole = metrics.get_ttft().mean, metrics.get_generate_duration().mean
        # Tokens of each pass.
        accepted = sum(count - 1 for count in metrics.raw_metrics.m_batch_sizes)
        timings = {"prompt_ms": first, "predicted_ms": whole - first, "draft_n_accepted": accepted}
        return {"tokens": list(result.tokens[0]), "timings": timings}


def main(options: Mapping[str, Any]) -> None:
    """Serve until a signal ends the process."""
    pipeline = Pipeline(options)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                status, answer = 200, pipeline.complete(asked)
            except RuntimeError as error:
                status, answer = 500, {"error": str(error)}
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    sys.stdout.write(f"{READY}http://127.0.0.1:{server.server_port} {pipeline.note}\n")
    sys.stdout.flush()
    server.serve_forever()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
