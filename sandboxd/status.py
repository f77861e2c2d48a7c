"""The one table between our errors and gRPC statuses, read in both directions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

from sandboxd import errors
from sandboxd.fitting import fitted

DOMAIN = "sandboxd"

CODES: dict[type[errors.SandboxdError], grpc.StatusCode] = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.PoolNotFound: grpc.StatusCode.NOT_FOUND,
    errors.SandboxNotFound: grpc.StatusCode.NOT_FOUND,
    errors.LeaseExpired: grpc.StatusCode.NOT_FOUND,
    errors.FileNotFound: grpc.StatusCode.NOT_FOUND,
    errors.CommandNotFound: grpc.StatusCode.NOT_FOUND,
    errors.CommandExists: grpc.StatusCode.ALREADY_EXISTS,
    errors.FileFailed: grpc.StatusCode.FAILED_PRECONDITION,
    errors.QueueFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.PoolFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.AcquireTimedOut: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.StartFailed: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.SandboxLost: grpc.StatusCode.ABORTED,
    errors.BackendUnavailable: grpc.StatusCode.UNAVAILABLE,
    errors.Draining: grpc.StatusCode.UNAVAILABLE,
    errors.Internal: grpc.StatusCode.INTERNAL,
}
# What gRPC itself tells of a call whose connection broke under a message that it was sending.
UNSENT = "Internal error from Core"
# ... and of one that the daemon's end refused before anything of ours saw it.
TOO_LARGE = "SERVER: Received message larger than max"
CLASSES = {error.reason: error for error in CODES}
# Proto numbers of the canonical codes, since grpc.StatusCode carries them as (number, name).
_NUMBERS = {code: code_pb2.Code.Value(code.name) for code in CODES.values()}
_NUMBERS[grpc.StatusCode.FAILED_PRECONDITION] = code_pb2.FAILED_PRECONDITION


def code_of(error: errors.SandboxdError) -> grpc.StatusCode:
    """The status code; a start that no repetition can mend is a FAILED_PRECONDITION."""
    if isinstance(error, errors.StartFailed) and not error.retryable:
        return grpc.StatusCode.FAILED_PRECONDITION
    return CODES[type(error)]


def to_status(error: errors.SandboxdError) -> status_pb2.Status:
    """The full status, with ErrorInfo and, where waiting helps, RetryInfo; as much of it as can be sent."""
    metadata = {"cause": error.cause.value, "mask": str(error.mask).lower(), **error.metadata}
    if error.phase is not None:
        metadata["phase"] = error.phase.value
    message, metadata = fitted(error.message, metadata)
    details = [error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata)]
    status = status_pb2.Status(code=_NUMBERS[code_of(error)], message=message)
    status.details.extend(_packed(detail) for detail in details)
    if error.retry_after is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after * 1e9))
        status.details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    return status


def _packed(message: error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Within the block a failed call raises what the daemon raised."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from None
    except grpc.aio.UsageError as error:
        raise errors.BackendUnavailable(f"the client is closed: {error}") from None


def from_rpc_error(error: grpc.aio.AioRpcError) -> errors.SandboxdError:
    """The exception that the daemon raised, rebuilt from its status.

    A status that the daemon did not make (the connection broke, the deadline passed on the way) becomes
    BackendUnavailable, AcquireTimedOut or Internal by its code.
    """
    status = _status_of(error)
    info, retry_after = error_details_pb2.ErrorInfo(), None
    for detail in status.details if status else ():
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            detail.Unpack(info)
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            retry = error_details_pb2.RetryInfo()
            detail.Unpack(retry)
            retry_after = retry.retry_delay.ToNanoseconds() / 1e9
    message = error.details() or error.code().name
    if info.domain != DOMAIN or info.reason not in CLASSES:
        return _foreign(error.code(), message)
    metadata = {k: v for k, v in info.metadata.items() if k not in ("cause", "mask", "phase")}
    phase = errors.Phase(info.metadata["phase"]) if "phase" in info.metadata else None
    return CLASSES[info.reason](message, phase=phase, retry_after=retry_after, metadata=metadata)


def made_by_daemon(error: grpc.aio.AioRpcError) -> bool:
    """False where the connection broke, or nobody answered."""
    return _status_of(error) is not None


def _status_of(error: grpc.aio.AioRpcError) -> status_pb2.Status | None:
    """The status in the call's trailing metadata; None where the peer sent none."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            return status_pb2.Status.FromString(value)
    return None


def _foreign(code: grpc.StatusCode, message: str) -> errors.SandboxdError:
    match code:
        case grpc.StatusCode.UNAVAILABLE:
            return errors.BackendUnavailable(f"no daemon answers: {message.rpartition('last error: ')[2]}")
        case grpc.StatusCode.CANCELLED:
            # Not by this side, which would hear of it as a cancellation.
            return errors.BackendUnavailable("the call was cut off: the daemon is ending")
        case grpc.StatusCode.INTERNAL if message == UNSENT:
            return errors.BackendUnavailable("the connection broke while a message was sent")
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return errors.AcquireTimedOut(f"no answer in time: {message}")
        case grpc.StatusCode.RESOURCE_EXHAUSTED if message.startswith(TOO_LARGE):
            # gRPC's own words end with both sizes in bytes.
            return errors.InvalidRequest(
                f"the message is larger than the daemon takes {message.removeprefix(TOO_LARGE).strip()}:"
                " write what is large to a file of the sandbox, or send it piece by piece"
            )
        case _:
            return errors.Internal(f"{code.name}: {message}")
