from coppice.v1 import features_pb2 as _features_pb2
from coppice.v1 import sampling_pb2 as _sampling_pb2
from coppice.v1 import tree_pb2 as _tree_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DraftRequest(_message.Message):
    __slots__ = ("sequence_id", "open", "outcome", "expect", "close", "prompt_features")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    EXPECT_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FEATURES_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    open: OpenDraft
    outcome: DraftOutcome
    expect: Expect
    close: CloseDraft
    prompt_features: _features_pb2.PromptFeatures
    def __init__(self, sequence_id: _Optional[int] = ..., open: _Optional[_Union[OpenDraft, _Mapping]] = ..., outcome: _Optional[_Union[DraftOutcome, _Mapping]] = ..., expect: _Optional[_Union[Expect, _Mapping]] = ..., close: _Optional[_Union[CloseDraft, _Mapping]] = ..., prompt_features: _Optional[_Union[_features_pb2.PromptFeatures, _Mapping]] = ...) -> None: ...

class OpenDraft(_message.Message):
    __slots__ = ("prompt_token_ids", "sampling", "max_nodes", "acceptance", "row_multiple", "request_id", "cache_salt", "traceparent", "synchronous", "denoising")
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    ROW_MULTIPLE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    SYNCHRONOUS_FIELD_NUMBER: _ClassVar[int]
    DENOISING_FIELD_NUMBER: _ClassVar[int]
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _sampling_pb2.SamplingParams
    max_nodes: int
    acceptance: _sampling_pb2.AcceptanceRule
    row_multiple: int
    request_id: str
    cache_salt: str
    traceparent: str
    synchronous: bool
    denoising: _sampling_pb2.Denoising
    def __init__(self, prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., max_nodes: _Optional[int] = ..., acceptance: _Optional[_Union[_sampling_pb2.AcceptanceRule, str]] = ..., row_multiple: _Optional[int] = ..., request_id: _Optional[str] = ..., cache_salt: _Optional[str] = ..., traceparent: _Optional[str] = ..., synchronous: _Optional[bool] = ..., denoising: _Optional[_Union[_sampling_pb2.Denoising, _Mapping]] = ...) -> None: ...

class DraftOutcome(_message.Message):
    __slots__ = ("base_length", "token_ids", "features", "max_nodes", "row_multiple")
    BASE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_FIELD_NUMBER: _ClassVar[int]
    ROW_MULTIPLE_FIELD_NUMBER: _ClassVar[int]
    base_length: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    features: bytes
    max_nodes: int
    row_multiple: int
    def __init__(self, base_length: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., features: _Optional[bytes] = ..., max_nodes: _Optional[int] = ..., row_multiple: _Optional[int] = ...) -> None: ...

class Expect(_message.Message):
    __slots__ = ("base_length", "tree")
    BASE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    base_length: int
    tree: _tree_pb2.TokenTree
    def __init__(self, base_length: _Optional[int] = ..., tree: _Optional[_Union[_tree_pb2.TokenTree, _Mapping]] = ...) -> None: ...

class CloseDraft(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DraftResponse(_message.Message):
    __slots__ = ("sequence_id", "tree", "error", "ahead")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    tree: DraftTree
    error: DraftError
    ahead: DraftsAhead
    def __init__(self, sequence_id: _Optional[int] = ..., tree: _Optional[_Union[DraftTree, _Mapping]] = ..., error: _Optional[_Union[DraftError, _Mapping]] = ..., ahead: _Optional[_Union[DraftsAhead, _Mapping]] = ...) -> None: ...

class DraftsAhead(_message.Message):
    __slots__ = ("trees",)
    TREES_FIELD_NUMBER: _ClassVar[int]
    trees: _containers.RepeatedCompositeFieldContainer[DraftTree]
    def __init__(self, trees: _Optional[_Iterable[_Union[DraftTree, _Mapping]]] = ...) -> None: ...

class DraftTree(_message.Message):
    __slots__ = ("base_length", "tree", "assumed_token_ids", "draft_us", "outcome_log_prob")
    BASE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    ASSUMED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_US_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_LOG_PROB_FIELD_NUMBER: _ClassVar[int]
    base_length: int
    tree: _tree_pb2.TokenTree
    assumed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    draft_us: int
    outcome_log_prob: float
    def __init__(self, base_length: _Optional[int] = ..., tree: _Optional[_Union[_tree_pb2.TokenTree, _Mapping]] = ..., assumed_token_ids: _Optional[_Iterable[int]] = ..., draft_us: _Optional[int] = ..., outcome_log_prob: _Optional[float] = ...) -> None: ...

class DraftError(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class DrafterServiceDescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrafterServiceDescribeResponse(_message.Message):
    __slots__ = ("kind", "model", "tokenizer_fingerprint", "vocab_size", "needs_features", "feature_size", "acceptance_by_rank", "version", "acceptance_rules", "shared_block_tokens", "drafts_ahead", "feature_layers", "target_weights_fingerprint", "max_prompt_features")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    NEEDS_FEATURES_FIELD_NUMBER: _ClassVar[int]
    FEATURE_SIZE_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_BY_RANK_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_RULES_FIELD_NUMBER: _ClassVar[int]
    SHARED_BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_AHEAD_FIELD_NUMBER: _ClassVar[int]
    FEATURE_LAYERS_FIELD_NUMBER: _ClassVar[int]
    TARGET_WEIGHTS_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MAX_PROMPT_FEATURES_FIELD_NUMBER: _ClassVar[int]
    kind: str
    model: str
    tokenizer_fingerprint: str
    vocab_size: int
    needs_features: bool
    feature_size: int
    acceptance_by_rank: _containers.RepeatedScalarFieldContainer[float]
    version: str
    acceptance_rules: _containers.RepeatedScalarFieldContainer[_sampling_pb2.AcceptanceRule]
    shared_block_tokens: int
    drafts_ahead: bool
    feature_layers: _containers.RepeatedScalarFieldContainer[int]
    target_weights_fingerprint: str
    max_prompt_features: int
    def __init__(self, kind: _Optional[str] = ..., model: _Optional[str] = ..., tokenizer_fingerprint: _Optional[str] = ..., vocab_size: _Optional[int] = ..., needs_features: _Optional[bool] = ..., feature_size: _Optional[int] = ..., acceptance_by_rank: _Optional[_Iterable[float]] = ..., version: _Optional[str] = ..., acceptance_rules: _Optional[_Iterable[_Union[_sampling_pb2.AcceptanceRule, str]]] = ..., shared_block_tokens: _Optional[int] = ..., drafts_ahead: _Optional[bool] = ..., feature_layers: _Optional[_Iterable[int]] = ..., target_weights_fingerprint: _Optional[str] = ..., max_prompt_features: _Optional[int] = ...) -> None: ...
