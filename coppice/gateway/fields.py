"""Bodies of requests: the fields that are served, their types, and errors that name the field.

Every other field is refused by name. null means that a field is not given. Ranges that the orchestrator checks are left
to it; here a number only has to fit its type in the contract.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, ValidationError, model_validator
from pydantic_core import CoreSchema, ErrorDetails

from coppice.gateway.errors import ApiError, invalid, unsupported

# Prompts of one request for completions; each is a call of its own.
MAX_PROMPTS = 64

Uint32 = Annotated[int, Field(ge=0, lt=2**32)]
Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]


class _FirstError:
    """Annotation of a list: validation ends with its first error, since a long list could have one for each item.

    pydantic's own `FailFast` cannot be part of a union.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return {**handler(source), "fail_fast": True}


Item = TypeVar("Item")
Several = Annotated[list[Item], _FirstError()]
TokenIdList = Annotated[Several[Uint32], Field(max_length=2**20)]
# With more errors than these none is told.
MOST_ERRORS = 100


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=())


class StreamOptions(_Body):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None

    @model_validator(mode="after")
    def _counts_where_usage_is_told(self) -> StreamOptions:
        if self.continuous_usage_stats and not self.include_usage:
            raise ValueError("continuous_usage_stats needs include_usage")
        return self


class JsonSchemaFormat(_Body):
    """`json_schema` of a response format. A schema is always kept, whatever `strict` says."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(_Body):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema must be given with the type json_schema, and with no other")
        return self


class StructuredOutputs(_Body):
    """`structured_outputs`: one of these."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Several[str] | None = None


class SpeculationFields(_Body):
    """`speculation`, as SpeculationPolicy of `inference.proto`."""

    mode: Literal["auto", "off", "forced"] | None = None
    sources: Several[str] | None = None
    max_nodes: Uint32 | None = None
    acceptance: Literal["sample-and-follow", "traversal"] | None = None


class GenerationFields(_Body):
    """Fields of both ways to generate."""

    model: str
    max_tokens: Uint32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: Seed | None = None
    stop: str | Several[str] | None = None
    n: Uint32 | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    user: Annotated[str, Field(max_length=128)] | None = None
    # As vLLM has them.
    top_k: Annotated[int, Field(ge=-1, lt=2**32)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Uint32 | None = None
    ignore_eos: bool | None = None
    stop_token_ids: TokenIdList | None = None
    allowed_token_ids: TokenIdList | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Several[str] | None = None
    structured_outputs: StructuredOutputs | None = None
    cache_salt: str | None = None
    priority: Int32 | None = None
    return_token_ids: bool | None = None
    # Of Coppice alone.
    speculation: SpeculationFields | None = None
    # Of vLLM; only what is done anyway.
    skip_special_tokens: Literal[True] | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    include_stop_str_in_output: Literal[False] | None = None
    use_beam_search: Literal[False] | None = None

    @model_validator(mode="after")
    def _streams_with_its_options(self) -> GenerationFields:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: needs stream")
        return self


class CompletionFields(GenerationFields):
    """Body of /v1/completions. The last ones may only have the value of doing nothing."""

    prompt: str | Several[Uint32] | Several[str] | Several[Several[Uint32]]
    logprobs: Uint32 | None = None

    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    suffix: Literal[""] | None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Every prompt, as text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return cast(list[str] | list[list[int]], self.prompt)


class TextPart(_Body):
    """A part of a message's content; only text is served."""

    type: Literal["text"]
    text: str


class FunctionCallFields(_Body):
    """`function` of a call; `arguments` is the text of a JSON object."""

    name: str
    arguments: str


class ToolCallFields(_Body):
    """A call in a message."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCallFields
    index: int | None = None


class FunctionFields(_Body):
    """`function` of a tool."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolFields(_Body):
    """A tool that an answer may call."""

    type: Literal["function"]
    function: FunctionFields


class ChosenFunction(_Body):
    """`function` of a chosen tool."""

    name: str


class ChosenTool(_Body):
    """`tool_choice` that names the tool to call."""

    type: Literal["function"]
    function: ChosenFunction


class MessageFields(_Body):
    """A message of a conversation. The last ones may only be null, as in answers that are sent back.

    Reasoning comes back with an answer, too; templates leave that of earlier answers out, so it is not sent on.
    """

    role: Annotated[str, Field(min_length=1)]
    content: str | Several[TextPart] | None = None
    name: str | None = None
    tool_calls: Several[ToolCallFields] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    refusal: None = None
    audio: None = None
    annotations: None = None
    function_call: None = None

    @property
    def text(self) -> str:
        """The content; parts are lines."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""


class TokenizeFields(_Body):
    """Body of /tokenize: a prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Several[MessageFields] | None = None
    tools: Several[ToolFields] | None = None
    add_generation_prompt: Literal[True] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _has_one_input(self) -> TokenizeFields:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: exactly one of prompt and messages must be given")
        if self.messages is None and self.tools is not None:
            raise ValueError("tools: need messages")
        if self.messages is not None and self.add_special_tokens is not None:
            raise ValueError("add_special_tokens: is for a prompt; a conversation's template has special tokens itself")
        return self


class DetokenizeFields(_Body):
    """Body of /detokenize."""

    model: str | None = None
    tokens: TokenIdList


class ChatFields(GenerationFields):
    """Body of /v1/chat/completions. The last ones may only have the value of doing nothing."""

    messages: Several[MessageFields]
    max_completion_tokens: Uint32 | None = None
    logprobs: bool | None = None
    top_logprobs: Uint32 | None = None
    tools: Several[ToolFields] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None

    add_generation_prompt: Literal[True] | None = None
    continue_final_message: Literal[False] | None = None
    echo: Literal[False] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    modalities: Several[Literal["text"]] | None = None
    functions: None = None
    function_call: None = None
    audio: None = None
    prediction: None = None
    metadata: None = None
    reasoning_effort: None = None
    verbosity: None = None
    web_search_options: None = None

    @model_validator(mode="after")
    def _fit_together(self) -> ChatFields:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: needs logprobs")
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise ValueError("tools: two have the same name")
        if not names and self.tool_choice not in (None, "none", "auto"):
            raise ValueError("tool_choice: needs tools")
        if isinstance(self.tool_choice, ChosenTool) and self.tool_choice.function.name not in names:
            raise ValueError("tool_choice: names a tool that is not among tools")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens: means the same as max_completion_tokens; give one of them")
        return self


# Fields that are known, and refused unless they ask for nothing.
_NEUTRAL = frozenset(
    {
        "best_of", "echo", "suffix", "store", "service_tier", "modalities", "functions", "function_call",
         "audio", "prediction", "metadata", "reasoning_effort", "verbosity", "web_search_options",
        "refusal", "annotations", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output",
        "use_beam_search", "add_generation_prompt", "continue_final_message",
    }
)  # fmt: skip
Fields = TypeVar("Fields", bound=BaseModel)


def parse(body: bytes, kind: type[Fields]) -> Fields:
    """The fields of a body.

    Raises:
        ApiError: it is not JSON, has a field that is not served, or a value of the wrong type.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        if (count := error.error_count()) > MOST_ERRORS:
            raise ApiError(400, f"{count} fields are not served, or have values of the wrong type") from None
        raise _refusal(_furthest(error.errors(include_url=False, include_input=False))) from None


def _furthest(errors: list[ErrorDetails]) -> ErrorDetails:
    """The error furthest in of the first wrong field: each member of a union has one, and most stop early."""

    def place(error: ErrorDetails) -> tuple[int, int]:
        location = error["loc"]
        return len(location), location[-1] if location and isinstance(location[-1], int) else -1

    return max((one for one in errors if one["loc"][:1] == errors[0]["loc"][:1]), key=place)


def _refusal(error: ErrorDetails) -> ApiError:
    if error["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {error['msg']}", code="invalid_json")
    param = _path(error["loc"])
    if error["type"] == "extra_forbidden":
        return unsupported(param)
    last = str(error["loc"][-1]) if error["loc"] else ""
    if last in _NEUTRAL or param.rpartition(".")[2] in _NEUTRAL:
        return unsupported(param)
    if param.endswith(".type") and param.startswith("messages"):
        return unsupported(param, "only text can be read")
    text = error["msg"].removeprefix("Value error, ")
    if not param:
        # Of a rule over several fields, whose text begins with the first.
        field, _, text = text.partition(": ")
        return invalid(field, text) if text else ApiError(400, field)
    return invalid(param, text[:1].lower() + text[1:])


def _path(location: tuple[int | str, ...]) -> str:
    """Path of a field, without the names that pydantic gives the members of a union."""
    kept: list[str] = []
    for index, part in enumerate(location):
        is_member = isinstance(part, str) and index > 0 and (not part.isidentifier() or part in _MEMBERS)
        if not is_member:
            kept.append(str(part))
    return ".".join(kept)


_MEMBERS = frozenset({"str", "int", "bool", "float", "none", "dict", "constrained-int", "ChosenTool"})
