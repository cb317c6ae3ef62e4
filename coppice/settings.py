"""Settings of services: typed fields with range, unit and one sentence, read from environment variables.

A setting is declared once, in a subclass of `Settings`. Error messages, docs/configuration.md and the schema of the
chart's values are generated from the declarations (scripts/configuration.py).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Annotated, Any, Literal, Self, get_args, get_origin

from pydantic import Field, GetCoreSchemaHandler, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, ErrorDetails, core_schema
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

_BOUNDS = {"gt": "above {}", "ge": "at least {}", "lt": "below {}", "le": "at most {}"}


class ConfigError(ValueError):
    """A setting is missing or has a bad value; the message is one line and names the variable."""


@dataclass(frozen=True)
class Unit:
    """Metadata of a field: the unit of its values."""

    name: str


@dataclass(frozen=True)
class Rule:
    """Metadata of a field: condition beyond type and bounds; `text` completes "must be"."""

    text: str
    holds: Callable[[Any], bool]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Called by pydantic: validate the type, then the rule."""
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def _checked(self, value: Any) -> Any:
        if not self.holds(value):
            raise ValueError(self.text)
        return value


class _Mark(Enum):
    """Metadata of a field.

    `VERBATIM`: surrounding spaces belong to the value. `LAB`: for measurements only; its value comes from COPPICE_LAB.
    """

    VERBATIM = auto()
    LAB = auto()


VERBATIM, LAB = _Mark.VERBATIM, _Mark.LAB
# JSON object of settings marked LAB, by lower-case name; those of other services are ignored.
LAB_VARIABLE = "COPPICE_LAB"

Seconds = Annotated[float, Unit("s")]
Milliseconds = Annotated[float, Unit("ms")]
Mebibytes = Annotated[int, Unit("MiB")]
Tokens = Annotated[int, Unit("tokens")]
Nodes = Annotated[int, Unit("nodes")]
Rows = Annotated[int, Unit("rows")]
Port = Annotated[int, Field(ge=0, le=65535)]
Switch = Literal["on", "off"]


class Settings(BaseSettings):
    """Frozen settings; each field is the environment variable of the same name in capitals.

    The constructor does not read the environment.

    Raises:
        ConfigError: a value is missing or out of range.
    """

    model_config = SettingsConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, enable_decoding=False)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_message(type(self).model_fields, error.errors()[0])) from None

    @classmethod
    def from_env(
        cls,
        env: Mapping[str, str] = os.environ,
        *,
        prefix: str = "",
        prefixed_only: Collection[str] = (),
        **values: Any,
    ) -> Self:
        """Settings from an environment; empty variables count as unset, unknown ones are ignored.

        Variables with the `prefix` override those without; those in `prefixed_only` need it. `values` override both.
        Fields marked LAB come from COPPICE_LAB alone.

        Raises:
            ConfigError: a variable is missing or invalid.
        """
        shared = {name: text for name, text in env.items() if name not in prefixed_only}
        read = _Variables(cls, shared)() | (_Variables(cls, env, prefix)() if prefix else {})
        lab = {name for name, field in cls.model_fields.items() if LAB in field.metadata}
        own = {name: value for name, value in read.items() if name not in lab}
        overrides = {name: value for name, value in lab_overrides(env).items() if name in lab}
        return cls(**own | overrides | values)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Called by pydantic: only use the constructor's arguments."""
        return (init_settings,)


class _Variables(EnvSettingsSource):
    """Values of the fields in a mapping of environment variables."""

    def __init__(self, settings: type[Settings], env: Mapping[str, str], prefix: str = "") -> None:
        self._env = {name.lower(): text for name, text in env.items() if name.isupper()}
        super().__init__(settings, case_sensitive=True, env_prefix=prefix.lower())

    def _load_env_vars(self) -> Mapping[str, str | None]:
        return self._env

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        value, key, is_complex = super().get_field_value(field, field_name)
        text = value if value is None or VERBATIM in field.metadata else value.strip()
        return text or None, key, is_complex


def lab_overrides(env: Mapping[str, str]) -> dict[str, Any]:
    """Settings in COPPICE_LAB.

    Raises:
        ConfigError: the value is not a JSON object.
    """
    text = env.get(LAB_VARIABLE) or "{}"
    try:
        overrides = json.loads(text)
    except ValueError:
        overrides = None
    if not isinstance(overrides, dict):
        raise ConfigError(f"{LAB_VARIABLE} must be a JSON object, got {text!r}")
    return overrides


def allowed(field: FieldInfo) -> str:
    """Allowed values of a field, such as "one of on, off" or "a whole number in 1..64"; completes "must be"."""
    if rules := [part.text for part in field.metadata if isinstance(part, Rule)]:
        return rules[0]
    if get_origin(field.annotation) is Literal:
        return f"one of {', '.join(get_args(field.annotation))}"
    if field.annotation is bool:
        return "true or false"
    noun = "a whole number" if field.annotation is int else "a number" if field.annotation is float else "text"
    return " ".join(filter(None, (noun, bounds(field))))


def bounds(field: FieldInfo) -> str:
    """Bounds of a number, such as "in 1..64" or "of at least 0"; empty without bounds."""
    limits = limits_of(field)
    if limits.keys() == {"ge", "le"}:
        return f"in {plain(limits['ge'])}..{plain(limits['le'])}"
    text = " and ".join(words.format(plain(limits[bound])) for bound, words in _BOUNDS.items() if bound in limits)
    return f"of {text}" if text.startswith("at") else text


def plain(number: float) -> str:
    """Decimal form of a number, without a point if it is whole."""
    return str(int(number) if number == int(number) else number)


def limits_of(field: FieldInfo) -> dict[str, float]:
    """Bounds of a number by pydantic's names: ge, gt, le, lt."""
    found = {bound: getattr(part, bound, None) for part in field.metadata for bound in _BOUNDS if hasattr(part, bound)}
    return {bound: limit for bound, limit in found.items() if limit is not None}


def is_address(text: str) -> bool:
    """Whether a text is HOST:PORT."""
    host, _, port = text.rpartition(":")
    return bool(host) and "/" not in host and port.isdecimal() and int(port) < 65536


def parts(text: Any) -> Any:
    """Comma-separated parts of a text, stripped; other types pass through to validation."""
    return tuple(filter(None, map(str.strip, text.split(",")))) if isinstance(text, str) else text


def _message(fields: Mapping[str, FieldInfo], error: ErrorDetails) -> str:
    if not error["loc"]:
        return str(error["ctx"]["error"])
    name = str(error["loc"][0])
    if name not in fields:
        return f"there is no setting {name.upper()}"
    got = "" if error["type"] == "missing" else error["input"]
    # A secret is not told.
    shown = f", got {got!r}" if fields[name].repr else ""
    return f"{name.upper()} must be {allowed(fields[name])}{shown}"
