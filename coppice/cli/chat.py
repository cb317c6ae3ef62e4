"""`coppice chat`: a conversation in the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from coppice.cli.generate import connected
from coppice.cli.options import DEFAULT_CHAT_TARGET, ServerOptions, Target, refusing
from coppice.client import Client, Options, RequestFailedError, Stream
from coppice.completion import Completion

HELP = """\
/speculation on|off   whether drafters take part; the answers are the same
/clear                begin a new conversation
/help                 this
/exit                 end, as does Ctrl-D. Ctrl-C stops an answer."""

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class ChatServerOptions(ServerOptions):
    """A private topology serves a chat model."""

    target: Target = DEFAULT_CHAT_TARGET


def chat(
    server: ChatServerOptions,
    system: Annotated[str, typer.Option(metavar="TEXT", help="What the model is told before the conversation.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, max=2**32 - 1, help="Most tokens of an answer.")] = 512,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy decoding, the default.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=2**64 - 1, help="Seed of the noise. Default: random.")] = None,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds that an answer may take.")] = 600.0,
) -> None:
    """Talk with a model that has a chat template; answers are streamed, with their speed after each."""
    options = Options(max_tokens=max_tokens, temperature=temperature, seed=seed)
    with refusing("--system", UnicodeEncodeError):
        system.encode()

    async def run() -> None:
        async with connected(server) as client:
            await Conversation(client, options, system, timeout).run()

    asyncio.run(run())


class Conversation:
    """What was said so far, and the loop that goes on with it."""

    def __init__(self, client: Client, options: Options, system: str, timeout_s: float) -> None:
        self._client = client
        self._options = options
        self._timeout_s = timeout_s
        self._beginning: list[Message] = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._beginning)
        self._speculation = "auto"
        self._stream: Stream | None = None
        self._is_stopped = False
        self._has_failed = False

    async def run(self) -> None:
        """Read lines and answer them until the input ends.

        Raises:
            typer.Exit: an answer failed and no person has seen it, since lines come from a file or another command.
        """
        if sys.stdin.isatty():
            typer.echo("/help lists the commands; Ctrl-D ends.", err=True)
        with _interrupts(self._stop):
            while (line := await asyncio.to_thread(_read_line)) is not None:
                if line.startswith("/"):
                    if not self._obey(line):
                        break
                elif line:
                    await self._answer(line)
        if self._has_failed and not sys.stdin.isatty():
            raise typer.Exit(1)

    def _obey(self, line: str) -> bool:
        """Carry out a command; whether the conversation goes on."""
        match line.split():
            case ["/exit" | "/quit"]:
                return False
            case ["/clear"]:
                self._messages = list(self._beginning)
            case ["/speculation", "on" | "off" as wanted]:
                self._speculation = "auto" if wanted == "on" else "off"
                typer.echo(f"speculation is {wanted}", err=True)
            case ["/help"]:
                typer.echo(HELP, err=True)
            case _:
                typer.echo(f"there is no such command\n{HELP}", err=True)
        return True

    async def _answer(self, line: str) -> None:
        try:
            line.encode()
        except UnicodeEncodeError as error:
            typer.echo(f"coppice: not valid text: {error}", err=True)
            self._has_failed = True
            return
        messages = [*self._messages, {"role": "user", "content": line}]
        options = replace(self._options, speculation=self._speculation)
        said: list[str] = []
        start = time.perf_counter()
        self._is_stopped = False
        self._stream = stream = self._client.stream_chat(messages, options, self._timeout_s)
        try:
            async for chunk in stream:
                said.append(chunk.text)
                typer.echo(chunk.text, nl=False)
            typer.echo()
            typer.echo(_dim(figures(stream.result(), time.perf_counter() - start)), err=True)
        except (RequestFailedError, asyncio.CancelledError) as failure:
            typer.echo()
            if not self._is_stopped:
                if isinstance(failure, asyncio.CancelledError):
                    raise
                typer.echo(f"coppice: {failure}", err=True)
                self._has_failed = True
                return
            typer.echo(_dim("stopped"), err=True)
        finally:
            self._stream = None
        self._messages = [*messages, {"role": "assistant", "content": "".join(said)}]

    def _stop(self) -> None:
        if self._stream is not None:
            self._is_stopped = True
            self._stream.cancel()
        else:
            typer.echo("\n(/exit or Ctrl-D ends)", err=True)


def figures(completion: Completion, seconds: float) -> str:
    """An answer's length, its speed with the prompt's time included, and τ, tokens per pass of the target."""
    tokens, counts = len(completion.token_ids), completion.speculation
    return f"[{tokens} tokens, {tokens / seconds:.1f} tokens/s, τ {counts.mean_acceptance_length:.2f}]"


def _read_line() -> str | None:
    """A line of the terminal or of a file; None at the end."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None


def _dim(text: str) -> str:
    return typer.style(text, dim=True) if sys.stderr.isatty() else text


@contextlib.contextmanager
def _interrupts(handle: Callable[[], None]) -> Iterator[None]:
    """Calls `handle` for Ctrl-C, in place of what asyncio does."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, handle)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
