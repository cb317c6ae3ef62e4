from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class DraftOrigin(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DRAFT_ORIGIN_UNSPECIFIED: _ClassVar[DraftOrigin]
    DRAFT_ORIGIN_FRESH: _ClassVar[DraftOrigin]
    DRAFT_ORIGIN_LEFT_OVER: _ClassVar[DraftOrigin]
    DRAFT_ORIGIN_REROOTED: _ClassVar[DraftOrigin]
    DRAFT_ORIGIN_AHEAD: _ClassVar[DraftOrigin]
    DRAFT_ORIGIN_REDRAFT: _ClassVar[DraftOrigin]
DRAFT_ORIGIN_UNSPECIFIED: DraftOrigin
DRAFT_ORIGIN_FRESH: DraftOrigin
DRAFT_ORIGIN_LEFT_OVER: DraftOrigin
DRAFT_ORIGIN_REROOTED: DraftOrigin
DRAFT_ORIGIN_AHEAD: DraftOrigin
DRAFT_ORIGIN_REDRAFT: DraftOrigin

class TokenTree(_message.Message):
    __slots__ = ("token_ids", "parents", "log_probs", "sources", "source_names", "distribution_sizes", "distribution_token_ids", "distribution_weights")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    SOURCE_NAMES_FIELD_NUMBER: _ClassVar[int]
    DISTRIBUTION_SIZES_FIELD_NUMBER: _ClassVar[int]
    DISTRIBUTION_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DISTRIBUTION_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    log_probs: _containers.RepeatedScalarFieldContainer[float]
    sources: _containers.RepeatedScalarFieldContainer[int]
    source_names: _containers.RepeatedScalarFieldContainer[str]
    distribution_sizes: _containers.RepeatedScalarFieldContainer[int]
    distribution_token_ids: _containers.RepeatedScalarFieldContainer[int]
    distribution_weights: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ..., log_probs: _Optional[_Iterable[float]] = ..., sources: _Optional[_Iterable[int]] = ..., source_names: _Optional[_Iterable[str]] = ..., distribution_sizes: _Optional[_Iterable[int]] = ..., distribution_token_ids: _Optional[_Iterable[int]] = ..., distribution_weights: _Optional[_Iterable[float]] = ...) -> None: ...
