"""A relay between two services that changes their messages into those of another version of the contracts."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message

ROOT = Path(__file__).resolve().parents[1]
# The contracts of the version before.
PREVIOUS = "e5a3ac33"
OURS = "coppice.v1."
# Fields with numbers that no message has: a number, text, and a message with another such field in it.
UNKNOWN = b"\xc0\xbb\x01\x96\x01" + b"\xca\xbb\x01\x05later" + b"\xd2\xbb\x01\x05\xc0\xbb\x01\x96\x01"
# From a message's type and bytes to other bytes.
Change = Callable[[str, bytes], bytes]


def newer(kind: str, data: bytes) -> bytes:
    """The message as a later version might send it: with unknown fields in it and in all of its parts."""
    message = message_factory.GetMessageClass(descriptor_pool.Default().FindMessageTypeByName(kind))()
    message.ParseFromString(data)
    _extend(message)
    return message.SerializeToString()


def _extend(message: Message) -> None:
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for part in value if field.is_repeated else [value]:
            _extend(part)
    message.MergeFromString(UNKNOWN)


def older(commit: str = PREVIOUS) -> Change:
    """A function that leaves of a message what the contracts of a commit have.

    Raises CalledProcessError, or OSError, where git does not have that commit.
    """
    pool = descriptor_pool.DescriptorPool()
    for file in _compiled(commit).file:
        pool.Add(file)

    def change(kind: str, data: bytes) -> bytes:
        message = message_factory.GetMessageClass(pool.FindMessageTypeByName(kind))()
        message.ParseFromString(data)
        message.DiscardUnknownFields()
        return message.SerializeToString()

    return change


def _compiled(commit: str) -> descriptor_pb2.FileDescriptorSet:
    from grpc_tools import protoc

    git = ["git", "-C", str(ROOT)]
    names = subprocess.run(
        [*git, "ls-tree", "-r", "--name-only", commit, "protos/coppice"], capture_output=True, check=True
    )
    with tempfile.TemporaryDirectory() as directory:
        for name in names.stdout.decode().split():
            path = Path(directory) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(subprocess.run([*git, "show", f"{commit}:{name}"], capture_output=True, check=True).stdout)
        root = Path(directory) / "protos"
        found = [str(path.relative_to(root)) for path in sorted(root.rglob("*.proto"))]
        out = Path(directory) / "set"
        options = [
            f"-I{root}",
            f"-I{files('grpc_tools') / '_proto'}",
            "--include_imports",
            f"--descriptor_set_out={out}",
        ]
        assert protoc.main(["protoc", *options, *found]) == 0
        return descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes())


class ContractRelay(grpc.GenericRpcHandler):
    """Passes calls to `channel`, both ways through `change`; counts the messages of each type that it changed."""

    def __init__(self, channel: grpc.aio.Channel, change: Change) -> None:
        self._channel = channel
        self._change = change
        self.changed: dict[str, int] = {}

    def service(self, details: Any) -> Any:
        """A handler of raw messages for any method."""

        async def handle(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            async for response in self._relay(details.method, requests, context):
                yield response

        return grpc.stream_stream_rpc_method_handler(handle)

    async def _relay(self, method: str, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        name, _, short = method[1:].partition("/")
        told = descriptor_pool.Default().FindServiceByName(name).methods_by_name[short]

        async def sent() -> AsyncIterator[bytes]:
            async for request in requests:
                yield self._changed(told.input_type.full_name, request)

        metadata = [pair for pair in context.invocation_metadata() if not pair[0].startswith(("grpc-", "user-agent"))]
        call: Any = self._channel.stream_stream(method)(sent(), timeout=context.time_remaining(), metadata=metadata)
        try:
            async for response in call:
                yield self._changed(told.output_type.full_name, response)
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details() or "", error.trailing_metadata() or ())
        finally:
            call.cancel()

    def _changed(self, kind: str, data: bytes) -> bytes:
        if not kind.startswith(OURS):
            return data
        self.changed[kind] = self.changed.get(kind, 0) + 1
        return self._change(kind, data)


@contextlib.asynccontextmanager
async def relayed(target: str, change: Change) -> AsyncIterator[tuple[str, ContractRelay]]:
    """A relay to an address: the one to call instead, and the relay."""
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    server = grpc.aio.server(options=[*options, ("grpc.http2.min_ping_interval_without_data_ms", 1000)])
    async with grpc.aio.insecure_channel(target, options=options) as channel:
        relay = ContractRelay(channel, change)
        server.add_generic_rpc_handlers((relay,))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield f"127.0.0.1:{port}", relay
        finally:
            await server.stop(0)
