"""The table between errors and statuses is total, and reads the same in both directions."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2

from sandboxd import errors
from sandboxd.status import CLASSES, CODES, DOMAIN, code_of, from_rpc_error, to_status
from sandboxd.v1 import errors_pb2


def leaves(root: type[errors.SandboxdError]) -> set[type[errors.SandboxdError]]:
    found = {root}
    for child in root.__subclasses__():
        found |= leaves(child)
    return found


# Never raised themselves: each stands for its children in an `except`.
ABSTRACT = {errors.SandboxdError, errors.NotFound}
KINDS: list[type[errors.SandboxdError]] = sorted(CODES, key=lambda kind: kind.reason)


def test_every_error_has_a_code_and_every_reason_a_class() -> None:
    assert set(CODES) == leaves(errors.SandboxdError) - ABSTRACT
    named = set(errors_pb2.ErrorReason.keys()) - {"ERROR_REASON_UNSPECIFIED"}
    assert named == set(CLASSES)


def test_an_error_has_one_line_whatever_another_program_said() -> None:
    said = "the Engine refused it: exit status 2\n\nrax    0x0\r\nrbx    0x7ac3\n"
    assert errors.StartFailed(said).message == "the Engine refused it: exit status 2 rax 0x0 rbx 0x7ac3"


@pytest.mark.parametrize("kind", KINDS, ids=[kind.reason for kind in KINDS])
def test_an_error_survives_the_wire(kind: type[errors.SandboxdError]) -> None:
    sent = kind("what happened", phase=errors.Phase.EXEC, retry_after=1.5, metadata={"log": "last line"})
    received = from_rpc_error(as_rpc_error(sent))
    assert type(received) is kind
    assert received.message == "what happened"
    assert (received.phase, received.retry_after) == (errors.Phase.EXEC, 1.5)
    assert received.metadata["log"] == "last line"
    assert (received.cause, received.mask) == (sent.cause, sent.mask)


def test_a_start_that_cannot_succeed_has_another_code() -> None:
    fatal = errors.StartFailed("no such image", retryable=False)
    assert code_of(fatal) is grpc.StatusCode.FAILED_PRECONDITION
    received = from_rpc_error(as_rpc_error(fatal))
    assert isinstance(received, errors.StartFailed)
    assert not received.retryable


def test_the_metadata_says_whose_fault_it_was() -> None:
    info = error_details_pb2.ErrorInfo()
    to_status(errors.SandboxLost("gone")).details[0].Unpack(info)
    assert (info.domain, info.reason) == (DOMAIN, "SANDBOX_LOST")
    assert (info.metadata["cause"], info.metadata["mask"]) == ("INFRASTRUCTURE", "true")
    to_status(errors.FileNotFound("none")).details[0].Unpack(info)
    assert (info.metadata["cause"], info.metadata["mask"]) == ("TASK", "false")


@pytest.mark.parametrize(
    ("code", "details", "kind"),
    [
        (grpc.StatusCode.CANCELLED, "odd", errors.BackendUnavailable),
        (grpc.StatusCode.UNAVAILABLE, "odd", errors.BackendUnavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "odd", errors.AcquireTimedOut),
        (grpc.StatusCode.UNIMPLEMENTED, "odd", errors.Internal),
        (grpc.StatusCode.INTERNAL, "odd", errors.Internal),
        (grpc.StatusCode.INTERNAL, "Internal error from Core", errors.BackendUnavailable),
    ],
)
def test_a_foreign_status_becomes_one_of_ours(
    code: grpc.StatusCode, details: str, kind: type[errors.SandboxdError]
) -> None:
    foreign = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)
    assert type(from_rpc_error(foreign)) is kind


def as_rpc_error(error: errors.SandboxdError) -> grpc.aio.AioRpcError:
    status = to_status(error)
    trailing = grpc.aio.Metadata(("grpc-status-details-bin", status.SerializeToString()))
    return grpc.aio.AioRpcError(code_of(error), grpc.aio.Metadata(), trailing, details=status.message)
