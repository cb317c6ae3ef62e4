from coppice.v1 import sampling_pb2 as _sampling_pb2
from coppice.v1 import tree_pb2 as _tree_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class NodeState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NODE_STATE_UNSPECIFIED: _ClassVar[NodeState]
    NODE_STATE_ACCEPTED: _ClassVar[NodeState]
    NODE_STATE_REJECTED: _ClassVar[NodeState]
    NODE_STATE_PRUNED: _ClassVar[NodeState]

class Rounds(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROUNDS_UNSPECIFIED: _ClassVar[Rounds]
    ROUNDS_ASYNCHRONOUS: _ClassVar[Rounds]
    ROUNDS_SYNCHRONOUS: _ClassVar[Rounds]
NODE_STATE_UNSPECIFIED: NodeState
NODE_STATE_ACCEPTED: NodeState
NODE_STATE_REJECTED: NodeState
NODE_STATE_PRUNED: NodeState
ROUNDS_UNSPECIFIED: Rounds
ROUNDS_ASYNCHRONOUS: Rounds
ROUNDS_SYNCHRONOUS: Rounds

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "prompt", "token_ids", "messages", "sampling", "stopping", "response", "speculation", "resume_token_ids", "priority", "cache_salt", "num_outputs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt: str
    token_ids: TokenIds
    messages: ChatMessages
    sampling: _sampling_pb2.SamplingParams
    stopping: _sampling_pb2.StoppingOptions
    response: ResponseOptions
    speculation: SpeculationPolicy
    resume_token_ids: _containers.RepeatedScalarFieldContainer[int]
    priority: int
    cache_salt: str
    num_outputs: int
    def __init__(self, request_id: _Optional[str] = ..., prompt: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., messages: _Optional[_Union[ChatMessages, _Mapping]] = ..., sampling: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., stopping: _Optional[_Union[_sampling_pb2.StoppingOptions, _Mapping]] = ..., response: _Optional[_Union[ResponseOptions, _Mapping]] = ..., speculation: _Optional[_Union[SpeculationPolicy, _Mapping]] = ..., resume_token_ids: _Optional[_Iterable[int]] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ..., num_outputs: _Optional[int] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ChatMessages(_message.Message):
    __slots__ = ("messages", "tools")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    tools: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., tools: _Optional[_Iterable[str]] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "tool_calls", "tool_call_id", "name")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    tool_call_id: str
    name: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., tool_call_id: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class ToolCall(_message.Message):
    __slots__ = ("id", "name", "arguments")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    arguments: str
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class ResponseOptions(_message.Message):
    __slots__ = ("text", "token_ids", "top_log_probs", "token_bytes")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    text: bool
    token_ids: bool
    top_log_probs: int
    token_bytes: bool
    def __init__(self, text: _Optional[bool] = ..., token_ids: _Optional[bool] = ..., top_log_probs: _Optional[int] = ..., token_bytes: _Optional[bool] = ...) -> None: ...

class SpeculationPolicy(_message.Message):
    __slots__ = ("mode", "sources", "max_nodes", "acceptance", "exactness", "denoising")
    class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        MODE_UNSPECIFIED: _ClassVar[SpeculationPolicy.Mode]
        MODE_AUTO: _ClassVar[SpeculationPolicy.Mode]
        MODE_OFF: _ClassVar[SpeculationPolicy.Mode]
        MODE_FORCED: _ClassVar[SpeculationPolicy.Mode]
    MODE_UNSPECIFIED: SpeculationPolicy.Mode
    MODE_AUTO: SpeculationPolicy.Mode
    MODE_OFF: SpeculationPolicy.Mode
    MODE_FORCED: SpeculationPolicy.Mode
    MODE_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    EXACTNESS_FIELD_NUMBER: _ClassVar[int]
    DENOISING_FIELD_NUMBER: _ClassVar[int]
    mode: SpeculationPolicy.Mode
    sources: _containers.RepeatedScalarFieldContainer[str]
    max_nodes: int
    acceptance: _sampling_pb2.AcceptanceRule
    exactness: _sampling_pb2.Exactness
    denoising: _sampling_pb2.Denoising
    def __init__(self, mode: _Optional[_Union[SpeculationPolicy.Mode, str]] = ..., sources: _Optional[_Iterable[str]] = ..., max_nodes: _Optional[int] = ..., acceptance: _Optional[_Union[_sampling_pb2.AcceptanceRule, str]] = ..., exactness: _Optional[_Union[_sampling_pb2.Exactness, str]] = ..., denoising: _Optional[_Union[_sampling_pb2.Denoising, _Mapping]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("request_id", "seed", "text", "token_ids", "finished", "usage", "speculation", "timing", "log_probs", "output_index", "prompt_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_INDEX_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    seed: int
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finished: Finished
    usage: Usage
    speculation: SpeculationStats
    timing: Timing
    log_probs: _containers.RepeatedCompositeFieldContainer[TokenLogProbs]
    output_index: int
    prompt_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., seed: _Optional[int] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., speculation: _Optional[_Union[SpeculationStats, _Mapping]] = ..., timing: _Optional[_Union[Timing, _Mapping]] = ..., log_probs: _Optional[_Iterable[_Union[TokenLogProbs, _Mapping]]] = ..., output_index: _Optional[int] = ..., prompt_tokens: _Optional[int] = ...) -> None: ...

class TokenLogProbs(_message.Message):
    __slots__ = ("log_prob", "top_token_ids", "top_log_probs", "token", "top_tokens")
    LOG_PROB_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    log_prob: float
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_log_probs: _containers.RepeatedScalarFieldContainer[float]
    token: bytes
    top_tokens: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, log_prob: _Optional[float] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_log_probs: _Optional[_Iterable[float]] = ..., token: _Optional[bytes] = ..., top_tokens: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("reason", "stop_match")
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_MATCH_FIELD_NUMBER: _ClassVar[int]
    reason: _sampling_pb2.FinishReason
    stop_match: str
    def __init__(self, reason: _Optional[_Union[_sampling_pb2.FinishReason, str]] = ..., stop_match: _Optional[str] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "cached_prompt_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_prompt_tokens: _Optional[int] = ...) -> None: ...

class SpeculationStats(_message.Message):
    __slots__ = ("rounds", "draft_tokens", "accepted_tokens", "redraft_tokens", "sources", "rounds_drafted_by_depth", "rounds_accepted_by_depth", "stale_drafts", "near_ties", "origins", "expected_outcomes", "draft_ahead_hits_by_rank", "outcomes_inside_expected")
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REDRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_DRAFTED_BY_DEPTH_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_ACCEPTED_BY_DEPTH_FIELD_NUMBER: _ClassVar[int]
    STALE_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    NEAR_TIES_FIELD_NUMBER: _ClassVar[int]
    ORIGINS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_AHEAD_HITS_BY_RANK_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_INSIDE_EXPECTED_FIELD_NUMBER: _ClassVar[int]
    rounds: int
    draft_tokens: int
    accepted_tokens: int
    redraft_tokens: int
    sources: _containers.RepeatedCompositeFieldContainer[SourceStats]
    rounds_drafted_by_depth: _containers.RepeatedScalarFieldContainer[int]
    rounds_accepted_by_depth: _containers.RepeatedScalarFieldContainer[int]
    stale_drafts: int
    near_ties: int
    origins: _containers.RepeatedCompositeFieldContainer[OriginStats]
    expected_outcomes: int
    draft_ahead_hits_by_rank: _containers.RepeatedScalarFieldContainer[int]
    outcomes_inside_expected: int
    def __init__(self, rounds: _Optional[int] = ..., draft_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., redraft_tokens: _Optional[int] = ..., sources: _Optional[_Iterable[_Union[SourceStats, _Mapping]]] = ..., rounds_drafted_by_depth: _Optional[_Iterable[int]] = ..., rounds_accepted_by_depth: _Optional[_Iterable[int]] = ..., stale_drafts: _Optional[int] = ..., near_ties: _Optional[int] = ..., origins: _Optional[_Iterable[_Union[OriginStats, _Mapping]]] = ..., expected_outcomes: _Optional[int] = ..., draft_ahead_hits_by_rank: _Optional[_Iterable[int]] = ..., outcomes_inside_expected: _Optional[int] = ...) -> None: ...

class OriginStats(_message.Message):
    __slots__ = ("origin", "rounds", "draft_tokens", "accepted_tokens")
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    origin: _tree_pb2.DraftOrigin
    rounds: int
    draft_tokens: int
    accepted_tokens: int
    def __init__(self, origin: _Optional[_Union[_tree_pb2.DraftOrigin, str]] = ..., rounds: _Optional[int] = ..., draft_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ...) -> None: ...

class SourceStats(_message.Message):
    __slots__ = ("source", "proposed", "accepted")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    source: str
    proposed: int
    accepted: int
    def __init__(self, source: _Optional[str] = ..., proposed: _Optional[int] = ..., accepted: _Optional[int] = ...) -> None: ...

class Timing(_message.Message):
    __slots__ = ("queue_ms", "ttft_ms", "total_ms", "forward_ms", "linger_ms", "passes", "door_ms", "prompt_ms", "first_pass_ms", "bubble_ms")
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_MS_FIELD_NUMBER: _ClassVar[int]
    LINGER_MS_FIELD_NUMBER: _ClassVar[int]
    PASSES_FIELD_NUMBER: _ClassVar[int]
    DOOR_MS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_MS_FIELD_NUMBER: _ClassVar[int]
    FIRST_PASS_MS_FIELD_NUMBER: _ClassVar[int]
    BUBBLE_MS_FIELD_NUMBER: _ClassVar[int]
    queue_ms: float
    ttft_ms: float
    total_ms: float
    forward_ms: float
    linger_ms: float
    passes: _containers.RepeatedCompositeFieldContainer[PassTiming]
    door_ms: float
    prompt_ms: float
    first_pass_ms: float
    bubble_ms: float
    def __init__(self, queue_ms: _Optional[float] = ..., ttft_ms: _Optional[float] = ..., total_ms: _Optional[float] = ..., forward_ms: _Optional[float] = ..., linger_ms: _Optional[float] = ..., passes: _Optional[_Iterable[_Union[PassTiming, _Mapping]]] = ..., door_ms: _Optional[float] = ..., prompt_ms: _Optional[float] = ..., first_pass_ms: _Optional[float] = ..., bubble_ms: _Optional[float] = ...) -> None: ...

class PassTiming(_message.Message):
    __slots__ = ("rows", "count", "total_ms")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MS_FIELD_NUMBER: _ClassVar[int]
    rows: int
    count: int
    total_ms: float
    def __init__(self, rows: _Optional[int] = ..., count: _Optional[int] = ..., total_ms: _Optional[float] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("prompt", "messages", "special_tokens", "token_bytes")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    prompt: str
    messages: ChatMessages
    special_tokens: bool
    token_bytes: bool
    def __init__(self, prompt: _Optional[str] = ..., messages: _Optional[_Union[ChatMessages, _Mapping]] = ..., special_tokens: _Optional[bool] = ..., token_bytes: _Optional[bool] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids", "tokens")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[bytes]] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class WatchRoundsRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class WatchRoundsResponse(_message.Message):
    __slots__ = ("round", "load", "missed_rounds")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    MISSED_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    round: RoundReport
    load: LoadReport
    missed_rounds: int
    def __init__(self, round: _Optional[_Union[RoundReport, _Mapping]] = ..., load: _Optional[_Union[LoadReport, _Mapping]] = ..., missed_rounds: _Optional[int] = ...) -> None: ...

class RoundReport(_message.Message):
    __slots__ = ("request_id", "output_index", "time_s", "base_length", "token_ids", "tokens", "tree", "node_tokens", "node_states", "origin", "budget", "row_price", "pass_rows", "pass_us", "linger_us", "round_us")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_INDEX_FIELD_NUMBER: _ClassVar[int]
    TIME_S_FIELD_NUMBER: _ClassVar[int]
    BASE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    NODE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NODE_STATES_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    ROW_PRICE_FIELD_NUMBER: _ClassVar[int]
    PASS_ROWS_FIELD_NUMBER: _ClassVar[int]
    PASS_US_FIELD_NUMBER: _ClassVar[int]
    LINGER_US_FIELD_NUMBER: _ClassVar[int]
    ROUND_US_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    output_index: int
    time_s: float
    base_length: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[bytes]
    tree: _tree_pb2.TokenTree
    node_tokens: _containers.RepeatedScalarFieldContainer[bytes]
    node_states: _containers.RepeatedScalarFieldContainer[NodeState]
    origin: _tree_pb2.DraftOrigin
    budget: int
    row_price: float
    pass_rows: int
    pass_us: int
    linger_us: int
    round_us: int
    def __init__(self, request_id: _Optional[str] = ..., output_index: _Optional[int] = ..., time_s: _Optional[float] = ..., base_length: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[bytes]] = ..., tree: _Optional[_Union[_tree_pb2.TokenTree, _Mapping]] = ..., node_tokens: _Optional[_Iterable[bytes]] = ..., node_states: _Optional[_Iterable[_Union[NodeState, str]]] = ..., origin: _Optional[_Union[_tree_pb2.DraftOrigin, str]] = ..., budget: _Optional[int] = ..., row_price: _Optional[float] = ..., pass_rows: _Optional[int] = ..., pass_us: _Optional[int] = ..., linger_us: _Optional[int] = ..., round_us: _Optional[int] = ...) -> None: ...

class LoadReport(_message.Message):
    __slots__ = ("time_s", "running", "waiting", "planned_nodes", "drafting", "generated_tokens", "rounds", "draft_tokens", "accepted_tokens", "verifiers")
    TIME_S_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    PLANNED_NODES_FIELD_NUMBER: _ClassVar[int]
    DRAFTING_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VERIFIERS_FIELD_NUMBER: _ClassVar[int]
    time_s: float
    running: int
    waiting: int
    planned_nodes: int
    drafting: int
    generated_tokens: int
    rounds: int
    draft_tokens: int
    accepted_tokens: int
    verifiers: _containers.RepeatedCompositeFieldContainer[VerifierReport]
    def __init__(self, time_s: _Optional[float] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., planned_nodes: _Optional[int] = ..., drafting: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., rounds: _Optional[int] = ..., draft_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., verifiers: _Optional[_Iterable[_Union[VerifierReport, _Mapping]]] = ...) -> None: ...

class VerifierReport(_message.Message):
    __slots__ = ("batch_size", "rows", "pass_us", "queued_sequences", "free_kv_blocks", "row_price")
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    PASS_US_FIELD_NUMBER: _ClassVar[int]
    QUEUED_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    FREE_KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ROW_PRICE_FIELD_NUMBER: _ClassVar[int]
    batch_size: int
    rows: int
    pass_us: int
    queued_sequences: int
    free_kv_blocks: int
    row_price: float
    def __init__(self, batch_size: _Optional[int] = ..., rows: _Optional[int] = ..., pass_us: _Optional[int] = ..., queued_sequences: _Optional[int] = ..., free_kv_blocks: _Optional[int] = ..., row_price: _Optional[float] = ...) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelInfoResponse(_message.Message):
    __slots__ = ("model", "tokenizer_fingerprint", "vocab_size", "max_context_tokens", "eos_token_ids", "sources", "exactness", "version", "max_nodes", "max_outputs", "acceptance_rules", "num_verifiers", "refusals", "rounds", "dtype", "weights_fingerprint", "serving_fingerprint", "quantization", "call_format", "reasoning")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    EXACTNESS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_FIELD_NUMBER: _ClassVar[int]
    MAX_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_RULES_FIELD_NUMBER: _ClassVar[int]
    NUM_VERIFIERS_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SERVING_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    CALL_FORMAT_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    model: str
    tokenizer_fingerprint: str
    vocab_size: int
    max_context_tokens: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sources: _containers.RepeatedScalarFieldContainer[str]
    exactness: _sampling_pb2.Exactness
    version: str
    max_nodes: int
    max_outputs: int
    acceptance_rules: _containers.RepeatedScalarFieldContainer[_sampling_pb2.AcceptanceRule]
    num_verifiers: int
    refusals: _containers.RepeatedScalarFieldContainer[str]
    rounds: Rounds
    dtype: str
    weights_fingerprint: str
    serving_fingerprint: str
    quantization: str
    call_format: str
    reasoning: str
    def __init__(self, model: _Optional[str] = ..., tokenizer_fingerprint: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_context_tokens: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., sources: _Optional[_Iterable[str]] = ..., exactness: _Optional[_Union[_sampling_pb2.Exactness, str]] = ..., version: _Optional[str] = ..., max_nodes: _Optional[int] = ..., max_outputs: _Optional[int] = ..., acceptance_rules: _Optional[_Iterable[_Union[_sampling_pb2.AcceptanceRule, str]]] = ..., num_verifiers: _Optional[int] = ..., refusals: _Optional[_Iterable[str]] = ..., rounds: _Optional[_Union[Rounds, str]] = ..., dtype: _Optional[str] = ..., weights_fingerprint: _Optional[str] = ..., serving_fingerprint: _Optional[str] = ..., quantization: _Optional[str] = ..., call_format: _Optional[str] = ..., reasoning: _Optional[str] = ...) -> None: ...
