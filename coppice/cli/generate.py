"""`coppice generate`: one prompt, completed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated

import typer

from coppice.cli.options import ServerOptions, refusing
from coppice.cli.topology import running
from coppice.client import ACCEPTANCE, Client, Options, RequestFailedError, build_chat_request, build_request
from coppice.completion import Completion, outputs_json
from coppice.core.errors import InvalidRequestError
from coppice.core.log_probs import MAX_TOP_LOG_PROBS
from coppice.core.sampling import SamplingParams
from coppice.v1.inference_pb2 import GenerateRequest

Prompt = str | list[int]


def generate(
    server: ServerOptions,
    prompt: Annotated[str | None, typer.Option(help="Text to complete.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="The text is a question: apply the target's chat template to it.")
    ] = False,
    prompt_file: Annotated[Path | None, typer.Option(help="File with the text to complete; - for stdin.")] = None,
    token_ids: Annotated[str | None, typer.Option(metavar="1,2,3", help="Token ids to complete.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, max=2**32 - 1, help="Most tokens to generate.")] = 128,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy decoding, the default.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling, in (0, 1].")] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=2**64 - 1, help="Seed of the noise. Default: random.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text to stop before; repeatable.")] = None,
    json_schema: Annotated[
        str | None, typer.Option(metavar="FILE_OR_TEXT", help="Schema of the JSON value to write; text begins with {.")
    ] = None,
    regex: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Regular expression that the output matches.")
    ] = None,
    speculation: Annotated[
        str, typer.Option(metavar="auto|off|KIND,KIND", help="Whether to draft, and with which drafters.")
    ] = "auto",
    acceptance: Annotated[
        str, typer.Option(metavar="|".join(ACCEPTANCE), help="How drafts are accepted. Default: the server's.")
    ] = "",
    top_log_probs: Annotated[
        int | None,
        typer.Option(min=0, max=MAX_TOP_LOG_PROBS, help="With --json: log-probabilities, also of the N likeliest."),
    ] = None,
    num_outputs: Annotated[int, typer.Option(min=1, max=2**32 - 1, help="Outputs to generate for the prompt.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the text.")] = False,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds that the request may take.")] = 600.0,
) -> None:
    """Complete one prompt, streamed to stdout; several outputs, or one object with --json, at the end."""
    if json_schema is not None and regex is not None:
        raise typer.BadParameter("give --json-schema or --regex, not both")
    if acceptance and acceptance not in ACCEPTANCE:
        raise typer.BadParameter(f"must be one of {', '.join(ACCEPTANCE)}", param_hint="--acceptance")
    if top_log_probs is not None and not as_json:
        raise typer.BadParameter("needs --json", param_hint="--top-log-probs")
    # Seen before a model is loaded for it.
    _refuse_invalid(temperature=temperature, top_p=top_p)
    options = Options(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        stop=tuple(stop or ()),
        speculation=speculation,
        acceptance=acceptance or None,
        top_log_probs=top_log_probs,
        num_outputs=num_outputs,
        json_schema=None if json_schema is None else read_schema(json_schema),
        regex=regex,
    )
    try:
        given = read_prompt(prompt, prompt_file, token_ids)
        if chat and not isinstance(given, str):
            raise typer.BadParameter("needs --prompt or --prompt-file", param_hint="--chat")
        asked = [{"role": "user", "content": given}] if chat and isinstance(given, str) else None
        request = build_request(given, options) if asked is None else build_chat_request(asked, options)
    except UnicodeEncodeError as error:
        raise typer.BadParameter(f"not valid text: {error}") from error
    _refuse_unknown_sources(speculation, server)
    streams = num_outputs == 1 and not as_json
    completions = asyncio.run(_complete(server, request, timeout, streams=streams))
    if as_json:
        answer = completions[0].as_json() if num_outputs == 1 else outputs_json(completions)
        typer.echo(json.dumps(answer, ensure_ascii=False))
    elif streams:
        typer.echo("")
    else:
        for index, completion in enumerate(completions):
            typer.echo(f"--- output {index}, seed {completion.seed}\n{completion.text}")


def read_prompt(prompt: str | None, prompt_file: Path | None, token_ids: str | None) -> Prompt:
    """The prompt that the options give.

    Raises typer.BadParameter if not exactly one was given, or it is empty or cannot be read.
    """
    if sum(given is not None for given in (prompt, prompt_file, token_ids)) != 1:
        raise typer.BadParameter("give exactly one of --prompt, --prompt-file and --token-ids")
    given: Prompt = prompt or ""
    if prompt_file is not None:
        given = _read_file(prompt_file, "--prompt-file")
    elif token_ids is not None:
        given = _read_token_ids(token_ids)
    if not given:
        raise typer.BadParameter("the prompt must not be empty")
    return given


def _read_token_ids(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    for part in parts:
        if not part.isdecimal() or int(part) >= 2**32:
            raise typer.BadParameter(
                f"must be unsigned 32-bit numbers with commas between, got {part!r}", param_hint="--token-ids"
            )
    return [int(part) for part in parts]


def _refuse_invalid(**numbers: float | None) -> None:
    """Raise typer.BadParameter for a parameter of sampling, by its name, that no server would take."""
    for name, number in numbers.items():
        try:
            SamplingParams(**({} if number is None else {name: number}))  # type: ignore[arg-type]
        except InvalidRequestError as error:
            option = f"--{name.replace('_', '-')}"
            raise typer.BadParameter(str(error).partition(": ")[2], param_hint=option) from error


def _refuse_unknown_sources(speculation: str, server: ServerOptions) -> None:
    """Raise typer.BadParameter for a source that a private topology of these options cannot have."""
    if speculation in ("auto", "off") or (spec := server.spec()) is None:
        return
    from orchestrator.prefix_cache.guesses import SOURCE as CACHE
    from orchestrator.request.rounds import HEAD, PROMPT_LOOKUP, REDRAFT

    # Those without a drafter need a target that has them, which is known when it is loaded.
    known = sorted({*(drafter.kind for drafter in spec.drafters), CACHE, HEAD, PROMPT_LOOKUP, REDRAFT})
    for kind in (part.strip() for part in speculation.split(",")):
        if kind not in known:
            raise typer.BadParameter(
                f"must be auto, off or some of {', '.join(known)}, got {kind!r}", param_hint="--speculation"
            )


def read_schema(file_or_text: str) -> str:
    """The text of a schema that is given itself, or as the name of its file.

    Raises typer.BadParameter if the file cannot be read, or what it holds is not JSON.
    """
    is_text = file_or_text.lstrip().startswith("{")
    text = file_or_text if is_text else _read_file(Path(file_or_text), "--json-schema")
    try:
        json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"is not JSON: {error}", param_hint="--json-schema") from error
    return text


def _read_file(path: Path, option: str) -> str:
    if str(path) == "-":
        return sys.stdin.read()
    with refusing(option, OSError, UnicodeDecodeError):
        return path.read_text()


async def _complete(
    server: ServerOptions, request: GenerateRequest, timeout_s: float, *, streams: bool
) -> tuple[Completion, ...]:
    async with connected(server) as client:
        stream = client.stream_request(request, timeout_s)
        has_begun = False
        try:
            async for chunk in stream:
                if streams:
                    typer.echo(chunk.text, nl=False)
                    has_begun = True
            return stream.results()
        except RequestFailedError:
            if has_begun:
                # The reason has a line of its own.
                typer.echo("")
            raise


@contextlib.asynccontextmanager
async def connected(server: ServerOptions) -> AsyncIterator[Client]:
    """A client of the orchestrator that the options name, or of a private topology that runs meanwhile.

    Raises typer.BadParameter if the options describe nothing that can be asked.
    """
    address, tls, spec = server.address, server.secured(), server.spec()
    async with contextlib.AsyncExitStack() as stack:
        if spec is not None:
            address = (await stack.enter_async_context(running(spec))).address
        yield await stack.enter_async_context(Client(address, token=server.token, tls=tls))
