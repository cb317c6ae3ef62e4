from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class PromptFeatures(_message.Message):
    __slots__ = ("first_token", "features")
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    first_token: int
    features: bytes
    def __init__(self, first_token: _Optional[int] = ..., features: _Optional[bytes] = ...) -> None: ...
