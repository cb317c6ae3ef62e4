"""Write docs/configuration.md and the settings in k8s/values.schema.json, both from the declarations of the services.

`make configuration` runs it; tests/repo/test_configuration.py compares what is committed.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from coppice.colocated.config import ColocatedSettings
from coppice.gateway.config import GatewayConfig
from coppice.obs.logs import LogSettings
from coppice.obs.otel import TraceSettings
from coppice.settings import LAB, Settings, Unit, allowed, bounds, limits_of, plain
from drafter_svc.config import DrafterConfig
from orchestrator.config import Config
from verifier_svc.config import VerifierConfig

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "configuration.md"
SCHEMA = ROOT / "k8s" / "values.schema.json"

SERVICES: dict[str, type[Settings]] = {
    "orchestrator": Config,
    "verifier": VerifierConfig,
    "drafter": DrafterConfig,
    "gateway": GatewayConfig,
}
# Settings that the chart's templates set themselves, since they know addresses and ports; Secrets hold the last two.
SET_BY_THE_CHART = {
    "LISTEN_ADDRESS",
    "VERIFIER_ADDRESS",
    "TARGET_REVISION",
    "DRAFTER_ADDRESSES",
    "DRAFTER_KIND",
    "METRICS_PORT",
    "METRICS_TLS",
    "HEALTH_PORT",
    "TLS_CERT",
    "TLS_KEY",
    "TLS_CLIENT_CA",
    "BACKEND_TLS_CA",
    "BACKEND_TLS_CERT",
    "BACKEND_TLS_KEY",
    "BACKEND_TLS_NAME",
    "TOKENS_FILE",
    "ORCHESTRATOR_ADDRESS",
    "METRICS",
    "ORCHESTRATOR_TLS_CA",
    "ORCHESTRATOR_TLS_CERT",
    "ORCHESTRATOR_TLS_KEY",
    "ORCHESTRATOR_TLS_NAME",
    "REDIS_URL",
    "CACHE_SECRET",
}
# What the chart allows is less: a pod reaches no hub, and templates add up these times.
IN_THE_CHART: dict[str, dict[str, Any]] = {
    "MODEL": {"type": "string", "pattern": "^/"},
    "TARGET_MODEL": {"type": "string", "pattern": "^/"},
    "GRACE_S": {"type": "integer", "minimum": 0},
    "CONNECT_TIMEOUT_S": {"type": "integer", "minimum": 0},
}
TYPES: dict[object, str] = {int: "integer", float: "number", bool: "boolean", str: "text"}
# Texts of values that are none, and Kubernetes' $(NAME) of another variable.
TEXTS = {
    "integer": r"^(\s*[-+]?[0-9]+\s*|.*\$\(.+\).*)?$",
    "number": r"^(\s*[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?\s*|.*\$\(.+\).*)?$",
    "boolean": r"^([oO][nN]|[oO][fF][fF]|[tT][rR][uU][eE]|[fF][aA][lL][sS][eE]|[yY][eE][sS]|[nN][oO]|[01tTfFyYnN]|"
    r".*\$\(.+\).*)?$",
}
LIMITS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}

INTRODUCTION = """# Configuration

<!-- Written by scripts/configuration.py (`make configuration`) from the declarations in the code. -->

Services are configured by environment variables. An empty variable counts as unset, and an unknown one is ignored. A
wrong value ends the process with exit code 2 and one line that names the variable and what it may be. In the Helm chart
the same names stand under `config` of each service ([kubernetes.md](kubernetes.md)).
"""
TITLES = {
    "orchestrator": "## Orchestrator\n\n`python -m orchestrator`",
    "verifier": "## Verifier\n\n`python -m verifier_svc`",
    "drafter": "## Drafters\n\n`python -m drafter_svc`",
    "gateway": "## Gateway\n\n`python -m coppice.gateway`, the [OpenAI-compatible API](openai.md)",
}
COLOCATED = """## All services in one process

`python -m coppice.colocated` takes the settings of all three services. A variable is for every service that knows it;
with the prefix `VERIFIER_` or `DRAFTER_` it is for those alone, and goes first. `VERIFIER_MODEL` is the target.
Addresses, ports and certificates without a prefix are the orchestrator's. `REQUIRE_DRAFTERS` is true and
`DRAFTER_NICENESS` 10 unless they are set.
"""
LOGS = """## Logs and traces

Of every service; `TRACE_ROUNDS` is the orchestrator's. Traces take OpenTelemetry's own variables, too
([traces.md](traces.md)).
"""
OTHERS = """## Other variables

- `COPPICE_TOKEN`: the bearer token that `coppice` commands present ([security.md](security.md)).
- `COPPICE_MODELS`: the directory of the bundled models.
- `TIMELINE_DIR`: a directory for the events of each process, for `coppice bench timeline`.
"""
LAB_PARAGRAPH = """## Not for operators

`COPPICE_LAB` is for benchmarks and tests: a JSON object of values that otherwise belong to the checkpoint, are learned,
or never need to change, as in `{"rounds": "synchronous"}`. Names of other services are ignored. Nothing in it is kept
compatible.

"""


def type_of(field: FieldInfo) -> str:
    """The type of a setting in one word."""
    if get_origin(field.annotation) is Literal:
        return "choice"
    return "list" if get_origin(field.annotation) is tuple else TYPES[field.annotation or str]


def unit_of(field: FieldInfo) -> str:
    """The unit of a setting's values; empty where there is none."""
    return "".join(part.name for part in field.metadata if isinstance(part, Unit))


def operators(settings: type[Settings]) -> dict[str, FieldInfo]:
    """Settings of operators, by variable: all but those for measurements."""
    return {name.upper(): field for name, field in settings.model_fields.items() if LAB not in field.metadata}


def row(name: str, field: FieldInfo) -> str:
    """A setting's line of a table."""
    is_number = field.annotation in (int, float)
    text = bounds(field) if is_number and limits_of(field) else allowed(field)
    default = field.default
    if default is PydanticUndefined:
        shown = "required"
    elif default in ("", ()):
        shown = "empty"
    else:
        shown = f"`{plain(default) if is_number else str(default).lower()}`"
    values = "" if text == "text" else text.removeprefix("one of ").removeprefix("in ").removeprefix("of ")
    return f"| `{name}` | {type_of(field)} | {values} | {unit_of(field)} | {shown} | {field.description} |"


def table(*declarations: type[Settings]) -> str:
    """The settings of declarations: a class's own first, then those that it has from others."""
    lines = ["| Variable | Type | Range | Unit | Default | Meaning |", "|---|---|---|---|---|---|"]
    for one in declarations:
        own = one.__annotations__.keys()
        fields = sorted(operators(one).items(), key=lambda item: item[0].lower() not in own)
        lines += [row(name, field) for name, field in fields]
    return "\n".join(lines) + "\n"


def page() -> str:
    """The text of docs/configuration.md."""
    services = [f"{TITLES[name]}\n\n{table(settings)}" for name, settings in SERVICES.items()]
    others = [f"{COLOCATED}\n{table(ColocatedSettings)}", f"{LOGS}\n{table(LogSettings, TraceSettings)}", OTHERS]
    lab = ""
    for service, settings in SERVICES.items():
        names = [f"`{name}`" for name, field in settings.model_fields.items() if LAB in field.metadata]
        lab += f"- {service}: {', '.join(names)}\n"
    return "\n".join([INTRODUCTION, *services, *others, LAB_PARAGRAPH + lab])


def property_of(name: str, field: FieldInfo) -> dict[str, Any]:
    """The JSON schema of a setting in the chart's values: text is let through that the service can parse."""
    if name in IN_THE_CHART:
        return {**IN_THE_CHART[name], "description": field.description}
    if get_origin(field.annotation) is Literal:
        return {"enum": list(get_args(field.annotation)), "description": field.description}
    limits = {LIMITS[bound]: limit for bound, limit in limits_of(field).items()}
    kind = type_of(field)
    if kind not in TEXTS:
        return {"type": "string", **limits, "description": field.description}
    return {"type": [kind, "string"], "pattern": TEXTS[kind], **limits, "description": field.description}


def schema(text: str) -> str:
    """The text of k8s/values.schema.json with the services' settings as they are declared.

    Raises:
        ValueError: the text has no place for them.
    """
    for service, settings in SERVICES.items():
        lines = [
            f"        {json.dumps(name)}: {json.dumps(property_of(name, field))}"
            for name, field in operators(settings).items()
            if name not in SET_BY_THE_CHART
        ]
        place = rf'("{service}Config": {{\n      "type": "object",\n.*?\n      "properties": {{\n).*?(\n      }})'
        text, found = re.subn(place, lambda match: match[1] + ",\n".join(lines) + match[2], text, flags=re.DOTALL)  # noqa: B023
        if found != 1:
            raise ValueError(f"no definitions.{service}Config in the schema")
    return text


if __name__ == "__main__":
    PAGE.write_text(page())
    SCHEMA.write_text(schema(SCHEMA.read_text()))
