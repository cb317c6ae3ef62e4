"""`coppice token`: tokens for the file that TOKENS_FILE names."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from coppice.net.access_token import new_token, token_digest

app = typer.Typer(help="Bearer tokens for the public API.", no_args_is_help=True)


@app.callback()
def token() -> None:
    """Bearer tokens for the public API."""


@app.command()
def new(
    tenant: Annotated[str, typer.Option(help="Whose token it is.")],
    weight: Annotated[int | None, typer.Option(min=1, help="Share of the places.")] = None,
    max_requests: Annotated[int | None, typer.Option(min=1, help="Most outputs at once.")] = None,
    requests_per_minute: Annotated[int | None, typer.Option(min=1, help="Most outputs that begin.")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(min=1, help="Most tokens of prompts and outputs.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens of one output.")] = None,
    max_priority: Annotated[int | None, typer.Option(help="Highest priority of a request.")] = None,
    admin: Annotated[bool, typer.Option("--admin", help="It sees the rounds of all tenants' requests.")] = False,
) -> None:
    """Make a token. It is printed once, on stderr; stdout has the line for the file, which has only its hash.

    For a tenant that has a line already, add the hash to that line's list instead.
    """
    limits = {
        "weight": weight,
        "max_requests": max_requests,
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "max_tokens": max_tokens,
        "max_priority": max_priority,
    }
    if not tenant:
        raise typer.BadParameter("must not be empty", param_hint="--tenant")
    from orchestrator.api.tenants import parse_tokens

    secret = new_token()
    line: dict[str, Any] = {"tenant": tenant, "sha256": [token_digest(secret)]}
    if admin:
        line["admin"] = True
    line.update({name: value for name, value in limits.items() if value is not None})
    text = json.dumps(line)
    try:
        parse_tokens(text)
    except ValueError as error:
        raise typer.BadParameter(str(error).removeprefix("line 1: ")) from error
    typer.echo(secret, err=True)
    typer.echo(text)
