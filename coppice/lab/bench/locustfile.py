"""Load for those who prefer Locust: its users wait for their answers, as many at once as it is told.

    .venv/bin/python -m pip install -e '.[load]'
    .venv/bin/locust -f coppice/lab/bench/locustfile.py --headless -u 16 -r 4 -t 60s --host 127.0.0.1:50050

COPPICE_TOKEN is the token of a server that asks for one, COPPICE_TLS_CA the CA of one that speaks TLS.

Three lines of its report are from one call each: the whole request, the time to its first token, and its time per token
after that. It is a closed loop, and all its users share one Python thread: figures to be quoted are those of
`coppice bench load` and `coppice bench overload`.
"""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path
from typing import Any

import grpc
import grpc.experimental.gevent as grpc_gevent
from locust import User, between, task

from coppice.client import Options, build_request
from coppice.net.access_token import bearer_metadata
from coppice.v1 import inference_pb2_grpc

# Before the first channel: grpc's own threads would stop all users.
grpc_gevent.init_gevent()

PROMPTS = ("def fibonacci(n):", "class Stack:", "import os\n", "for line in lines:")
OPTIONS = Options(max_tokens=64)
DEADLINE_S = 120.0


class CompletionUser(User):  # type: ignore[misc]
    """Completes a prompt, reads it to the end, thinks for a moment, and comes again; `host` is host:port."""

    wait_time = between(0.0, 0.2)

    def on_start(self) -> None:
        """Open this user's channel."""
        authority = os.environ.get("COPPICE_TLS_CA", "")
        if authority:
            credentials = grpc.ssl_channel_credentials(Path(authority).read_bytes())
            self.channel = grpc.secure_channel(self.host, credentials)
        else:
            self.channel = grpc.insecure_channel(self.host)
        self.metadata = bearer_metadata(os.environ.get("COPPICE_TOKEN", ""))
        make: Any = inference_pb2_grpc.InferenceServiceStub
        self.stub = make(self.channel)
        self.number = 0

    def on_stop(self) -> None:
        """Close it."""
        self.channel.close()

    @task  # type: ignore[untyped-decorator]
    def complete(self) -> None:
        """One request; a refusal is a failure, by its status."""
        request = build_request(PROMPTS[self.number % len(PROMPTS)], OPTIONS)
        # None finds what an earlier one has computed for it.
        request.cache_salt = uuid.uuid4().hex
        self.number += 1
        start_s, first_s, num_tokens, failure = time.perf_counter(), 0.0, 0, None
        try:
            for response in self.stub.Generate(request, timeout=DEADLINE_S, metadata=self.metadata):
                if response.token_ids and not num_tokens:
                    first_s = time.perf_counter()
                num_tokens += len(response.token_ids)
        except grpc.RpcError as error:
            failure = error
        end_s = time.perf_counter()
        self._report("Generate", end_s - start_s, num_tokens, failure)
        if failure is None and num_tokens > 1:
            self._report("time to first token", first_s - start_s, num_tokens)
            self._report("per token after it", (end_s - first_s) / (num_tokens - 1), num_tokens)

    def _report(self, name: str, taken_s: float, num_tokens: int, failure: Exception | None = None) -> None:
        self.environment.events.request.fire(
            request_type="gRPC",
            name=name,
            response_time=1000 * taken_s,
            response_length=num_tokens,
            exception=failure,
            context={},
        )
