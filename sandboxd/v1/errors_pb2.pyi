from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from typing import ClassVar as _ClassVar

DESCRIPTOR: _descriptor.FileDescriptor

class ErrorReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ERROR_REASON_UNSPECIFIED: _ClassVar[ErrorReason]
    INVALID_REQUEST: _ClassVar[ErrorReason]
    POOL_NOT_FOUND: _ClassVar[ErrorReason]
    SANDBOX_NOT_FOUND: _ClassVar[ErrorReason]
    LEASE_EXPIRED: _ClassVar[ErrorReason]
    FILE_NOT_FOUND: _ClassVar[ErrorReason]
    FILE_FAILED: _ClassVar[ErrorReason]
    QUEUE_FULL: _ClassVar[ErrorReason]
    ACQUIRE_TIMED_OUT: _ClassVar[ErrorReason]
    START_FAILED: _ClassVar[ErrorReason]
    SANDBOX_LOST: _ClassVar[ErrorReason]
    BACKEND_UNAVAILABLE: _ClassVar[ErrorReason]
    DRAINING: _ClassVar[ErrorReason]
    INTERNAL: _ClassVar[ErrorReason]
    POOL_FULL: _ClassVar[ErrorReason]
    COMMAND_NOT_FOUND: _ClassVar[ErrorReason]
    COMMAND_EXISTS: _ClassVar[ErrorReason]
ERROR_REASON_UNSPECIFIED: ErrorReason
INVALID_REQUEST: ErrorReason
POOL_NOT_FOUND: ErrorReason
SANDBOX_NOT_FOUND: ErrorReason
LEASE_EXPIRED: ErrorReason
FILE_NOT_FOUND: ErrorReason
FILE_FAILED: ErrorReason
QUEUE_FULL: ErrorReason
ACQUIRE_TIMED_OUT: ErrorReason
START_FAILED: ErrorReason
SANDBOX_LOST: ErrorReason
BACKEND_UNAVAILABLE: ErrorReason
DRAINING: ErrorReason
INTERNAL: ErrorReason
POOL_FULL: ErrorReason
COMMAND_NOT_FOUND: ErrorReason
COMMAND_EXISTS: ErrorReason
