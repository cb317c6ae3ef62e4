from coppice.v1 import features_pb2 as _features_pb2
from coppice.v1 import sampling_pb2 as _sampling_pb2
from coppice.v1 import tree_pb2 as _tree_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VerifyRequest(_message.Message):
    __slots__ = ("sequence_id", "open", "draft", "close")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    open: OpenSequence
    draft: Draft
    close: CloseSequence
    def __init__(self, sequence_id: _Optional[int] = ..., open: _Optional[_Union[OpenSequence, _Mapping]] = ..., draft: _Optional[_Union[Draft, _Mapping]] = ..., close: _Optional[_Union[CloseSequence, _Mapping]] = ...) -> None: ...

class OpenSequence(_message.Message):
    __slots__ = ("prompt_token_ids", "sampling", "stopping", "acceptance", "exactness", "linger_us", "resumed_tokens", "priority", "max_redraft_nodes", "want_features", "cache_salt", "top_log_probs", "request_id", "traceparent", "synchronous", "max_lookup_nodes", "max_prompt_features", "max_head_nodes")
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    EXACTNESS_FIELD_NUMBER: _ClassVar[int]
    LINGER_US_FIELD_NUMBER: _ClassVar[int]
    RESUMED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    MAX_REDRAFT_NODES_FIELD_NUMBER: _ClassVar[int]
    WANT_FEATURES_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TOP_LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    SYNCHRONOUS_FIELD_NUMBER: _ClassVar[int]
    MAX_LOOKUP_NODES_FIELD_NUMBER: _ClassVar[int]
    MAX_PROMPT_FEATURES_FIELD_NUMBER: _ClassVar[int]
    MAX_HEAD_NODES_FIELD_NUMBER: _ClassVar[int]
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _sampling_pb2.SamplingParams
    stopping: _sampling_pb2.StoppingOptions
    acceptance: _sampling_pb2.AcceptanceRule
    exactness: _sampling_pb2.Exactness
    linger_us: int
    resumed_tokens: int
    priority: int
    max_redraft_nodes: int
    want_features: bool
    cache_salt: str
    top_log_probs: int
    request_id: str
    traceparent: str
    synchronous: bool
    max_lookup_nodes: int
    max_prompt_features: int
    max_head_nodes: int
    def __init__(self, prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., stopping: _Optional[_Union[_sampling_pb2.StoppingOptions, _Mapping]] = ..., acceptance: _Optional[_Union[_sampling_pb2.AcceptanceRule, str]] = ..., exactness: _Optional[_Union[_sampling_pb2.Exactness, str]] = ..., linger_us: _Optional[int] = ..., resumed_tokens: _Optional[int] = ..., priority: _Optional[int] = ..., max_redraft_nodes: _Optional[int] = ..., want_features: _Optional[bool] = ..., cache_salt: _Optional[str] = ..., top_log_probs: _Optional[int] = ..., request_id: _Optional[str] = ..., traceparent: _Optional[str] = ..., synchronous: _Optional[bool] = ..., max_lookup_nodes: _Optional[int] = ..., max_prompt_features: _Optional[int] = ..., max_head_nodes: _Optional[int] = ...) -> None: ...

class Draft(_message.Message):
    __slots__ = ("base_length", "tree", "budget", "linger_us", "ahead")
    BASE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    LINGER_US_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    base_length: int
    tree: _tree_pb2.TokenTree
    budget: int
    linger_us: int
    ahead: bool
    def __init__(self, base_length: _Optional[int] = ..., tree: _Optional[_Union[_tree_pb2.TokenTree, _Mapping]] = ..., budget: _Optional[int] = ..., linger_us: _Optional[int] = ..., ahead: _Optional[bool] = ...) -> None: ...

class CloseSequence(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VerifyResponse(_message.Message):
    __slots__ = ("sequence_id", "outcome", "finished", "error", "load", "draft_rejected", "draining", "prompt_features")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    DRAFT_REJECTED_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FEATURES_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    outcome: Outcome
    finished: SequenceFinished
    error: SequenceError
    load: Load
    draft_rejected: DraftRejected
    draining: Draining
    prompt_features: _features_pb2.PromptFeatures
    def __init__(self, sequence_id: _Optional[int] = ..., outcome: _Optional[_Union[Outcome, _Mapping]] = ..., finished: _Optional[_Union[SequenceFinished, _Mapping]] = ..., error: _Optional[_Union[SequenceError, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., draft_rejected: _Optional[_Union[DraftRejected, _Mapping]] = ..., draining: _Optional[_Union[Draining, _Mapping]] = ..., prompt_features: _Optional[_Union[_features_pb2.PromptFeatures, _Mapping]] = ...) -> None: ...

class Outcome(_message.Message):
    __slots__ = ("base_length", "token_ids", "accepted_nodes", "draft_nodes", "draft_depth", "redraft", "features", "log_probs", "pass_rows", "pass_us", "linger_us", "stale_drafts", "top_token_ids", "top_log_probs", "near_ties", "draft_origin", "bubble_us")
    BASE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_NODES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_NODES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_DEPTH_FIELD_NUMBER: _ClassVar[int]
    REDRAFT_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    PASS_ROWS_FIELD_NUMBER: _ClassVar[int]
    PASS_US_FIELD_NUMBER: _ClassVar[int]
    LINGER_US_FIELD_NUMBER: _ClassVar[int]
    STALE_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    NEAR_TIES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_ORIGIN_FIELD_NUMBER: _ClassVar[int]
    BUBBLE_US_FIELD_NUMBER: _ClassVar[int]
    base_length: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    accepted_nodes: _containers.RepeatedScalarFieldContainer[int]
    draft_nodes: int
    draft_depth: int
    redraft: _tree_pb2.TokenTree
    features: bytes
    log_probs: _containers.RepeatedScalarFieldContainer[float]
    pass_rows: int
    pass_us: int
    linger_us: int
    stale_drafts: int
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_log_probs: _containers.RepeatedScalarFieldContainer[float]
    near_ties: int
    draft_origin: _tree_pb2.DraftOrigin
    bubble_us: int
    def __init__(self, base_length: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., accepted_nodes: _Optional[_Iterable[int]] = ..., draft_nodes: _Optional[int] = ..., draft_depth: _Optional[int] = ..., redraft: _Optional[_Union[_tree_pb2.TokenTree, _Mapping]] = ..., features: _Optional[bytes] = ..., log_probs: _Optional[_Iterable[float]] = ..., pass_rows: _Optional[int] = ..., pass_us: _Optional[int] = ..., linger_us: _Optional[int] = ..., stale_drafts: _Optional[int] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_log_probs: _Optional[_Iterable[float]] = ..., near_ties: _Optional[int] = ..., draft_origin: _Optional[_Union[_tree_pb2.DraftOrigin, str]] = ..., bubble_us: _Optional[int] = ...) -> None: ...

class SequenceFinished(_message.Message):
    __slots__ = ("reason", "stop_match", "queue_us", "cached_tokens")
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_MATCH_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    reason: _sampling_pb2.FinishReason
    stop_match: str
    queue_us: int
    cached_tokens: int
    def __init__(self, reason: _Optional[_Union[_sampling_pb2.FinishReason, str]] = ..., stop_match: _Optional[str] = ..., queue_us: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class SequenceError(_message.Message):
    __slots__ = ("code", "message", "field")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    field: str
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ..., field: _Optional[str] = ...) -> None: ...

class DraftRejected(_message.Message):
    __slots__ = ("base_length", "code", "message", "field")
    BASE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    base_length: int
    code: int
    message: str
    field: str
    def __init__(self, base_length: _Optional[int] = ..., code: _Optional[int] = ..., message: _Optional[str] = ..., field: _Optional[str] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("batch_size", "rows", "pass_us", "queued_sequences", "free_kv_blocks", "running_sequences")
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    PASS_US_FIELD_NUMBER: _ClassVar[int]
    QUEUED_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    FREE_KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    batch_size: int
    rows: int
    pass_us: int
    queued_sequences: int
    free_kv_blocks: int
    running_sequences: int
    def __init__(self, batch_size: _Optional[int] = ..., rows: _Optional[int] = ..., pass_us: _Optional[int] = ..., queued_sequences: _Optional[int] = ..., free_kv_blocks: _Optional[int] = ..., running_sequences: _Optional[int] = ...) -> None: ...

class Draining(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VerifierServiceDescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VerifierServiceDescribeResponse(_message.Message):
    __slots__ = ("model", "tokenizer_fingerprint", "vocab_size", "max_context_tokens", "eos_token_ids", "max_nodes", "hidden_size", "exactness", "version", "shared_block_tokens", "acceptance_rules", "row_multiple", "hardware", "instance_id", "redraft_nodes", "feature_size", "dtype", "weights_fingerprint", "serving_fingerprint", "lookup_nodes", "feature_layers", "feature_layer_size", "quantization", "head_nodes", "target_revision")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    EXACTNESS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SHARED_BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_RULES_FIELD_NUMBER: _ClassVar[int]
    ROW_MULTIPLE_FIELD_NUMBER: _ClassVar[int]
    HARDWARE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    REDRAFT_NODES_FIELD_NUMBER: _ClassVar[int]
    FEATURE_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SERVING_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_NODES_FIELD_NUMBER: _ClassVar[int]
    FEATURE_LAYERS_FIELD_NUMBER: _ClassVar[int]
    FEATURE_LAYER_SIZE_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    HEAD_NODES_FIELD_NUMBER: _ClassVar[int]
    TARGET_REVISION_FIELD_NUMBER: _ClassVar[int]
    model: str
    tokenizer_fingerprint: str
    vocab_size: int
    max_context_tokens: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_nodes: int
    hidden_size: int
    exactness: _sampling_pb2.Exactness
    version: str
    shared_block_tokens: int
    acceptance_rules: _containers.RepeatedScalarFieldContainer[_sampling_pb2.AcceptanceRule]
    row_multiple: int
    hardware: str
    instance_id: str
    redraft_nodes: int
    feature_size: int
    dtype: str
    weights_fingerprint: str
    serving_fingerprint: str
    lookup_nodes: int
    feature_layers: _containers.RepeatedScalarFieldContainer[int]
    feature_layer_size: int
    quantization: str
    head_nodes: int
    target_revision: str
    def __init__(self, model: _Optional[str] = ..., tokenizer_fingerprint: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_context_tokens: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., max_nodes: _Optional[int] = ..., hidden_size: _Optional[int] = ..., exactness: _Optional[_Union[_sampling_pb2.Exactness, str]] = ..., version: _Optional[str] = ..., shared_block_tokens: _Optional[int] = ..., acceptance_rules: _Optional[_Iterable[_Union[_sampling_pb2.AcceptanceRule, str]]] = ..., row_multiple: _Optional[int] = ..., hardware: _Optional[str] = ..., instance_id: _Optional[str] = ..., redraft_nodes: _Optional[int] = ..., feature_size: _Optional[int] = ..., dtype: _Optional[str] = ..., weights_fingerprint: _Optional[str] = ..., serving_fingerprint: _Optional[str] = ..., lookup_nodes: _Optional[int] = ..., feature_layers: _Optional[_Iterable[int]] = ..., feature_layer_size: _Optional[int] = ..., quantization: _Optional[str] = ..., head_nodes: _Optional[int] = ..., target_revision: _Optional[str] = ...) -> None: ...

class GetTokenizerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTokenizerResponse(_message.Message):
    __slots__ = ("tokenizer_json", "tokenizer_fingerprint", "chat_template", "special_tokens")
    class SpecialTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TOKENIZER_JSON_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokenizer_json: bytes
    tokenizer_fingerprint: str
    chat_template: str
    special_tokens: _containers.ScalarMap[str, str]
    def __init__(self, tokenizer_json: _Optional[bytes] = ..., tokenizer_fingerprint: _Optional[str] = ..., chat_template: _Optional[str] = ..., special_tokens: _Optional[_Mapping[str, str]] = ...) -> None: ...
