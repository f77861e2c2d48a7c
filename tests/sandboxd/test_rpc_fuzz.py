"""Every method of the proto under arbitrary requests: served, or refused with what is wrong; no fault."""

from __future__ import annotations

import base64
import itertools
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandboxd.fitting import fitted, one_line
from sandboxd.status import CLASSES, DOMAIN
from sandboxd.v1 import sandbox_service_pb2 as pb
from sandboxd.v1 import sandbox_service_pb2_grpc as pb_grpc

from .conftest import daemon_process
from .rpc_kit import METHODS, field_names, living, requests

SETTINGS = """
drain_seconds = 0.2
[pools.python]
backend = "fake"
warm = 2
size_limit = 24
waiting_limit = 8
"""
# These wait as long as their caller does, for a sandbox, for a command or for news.
WAITING = {
    *("AcquireSandbox", "AcquireSandboxes", "WatchPool"),
    *("ExecCommand", "RunCommand", "InteractCommand", "AttachCommand"),
}
SHORT_SECONDS, LONG_SECONDS = 0.3, 20.0
REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
LONGEST_MESSAGE = 2000


class Daemon:
    """A daemon in a process of its own, and one sandbox of it that is leased whenever a call is made."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        self._sandboxes = pb_grpc.SandboxServiceStub(channel)
        self._pools = pb_grpc.PoolServiceStub(channel)
        self._sandbox = ""

    def living(self) -> str:
        try:
            self._sandboxes.GetSandbox(pb.GetSandboxRequest(name=self._sandbox))
        except grpc.RpcError:
            leased = self._sandboxes.AcquireSandbox(pb.AcquireSandboxRequest(pool="pools/python"), timeout=20)
            self._sandbox = leased.name
        return self._sandbox

    def call(self, method: MethodDescriptor, sent: list[Message]) -> list[Any]:
        """The first replies. Raises RpcError."""
        ways = ("stream" if many else "unary" for many in (method.client_streaming, method.server_streaming))
        make = getattr(self._channel, "_".join(ways))(
            f"/{method.containing_service.full_name}/{method.name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
        )
        timeout = SHORT_SECONDS if method.name in WAITING else LONG_SECONDS
        reply = make(iter(sent) if method.client_streaming else sent[0], timeout=timeout)
        if not method.server_streaming:
            return [reply]
        try:
            return list(itertools.islice(reply, 1 if method.name == "WatchPool" else 20))
        finally:
            reply.cancel()

    def as_before(self) -> None:
        """Ends the leases that a call was given, and sets what it has changed of the pool back."""
        pool = pb.Pool(name="pools/python", warm_count_target=2, size_limit=24)
        self._pools.UpdatePool(pb.UpdatePoolRequest(pool=pool))
        for sandbox in self._sandboxes.ListSandboxes(pb.ListSandboxesRequest(page_size=1000)).sandboxes:
            if sandbox.state == pb.Sandbox.ACTIVE and sandbox.name != self._sandbox:
                self._sandboxes.ReleaseSandbox(pb.ReleaseSandboxRequest(name=sandbox.name))


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with (
        daemon_process(tmp_path_factory.mktemp("fuzz"), SETTINGS) as address,
        grpc.insecure_channel(address) as channel,
    ):
        yield Daemon(channel)


def check(error: Any, method: MethodDescriptor) -> None:
    code, message = error.code(), error.details()
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        assert method.name in WAITING, "it hangs"
        return
    assert code in REFUSALS, f"{code}: {message}"
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in message:
        return  # gRPC's own word, before any of ours.
    trailing = dict(error.trailing_metadata())
    status = status_pb2.Status.FromString(trailing["grpc-status-details-bin"])
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert info.domain == DOMAIN
    assert info.reason in CLASSES
    assert message, "it says nothing"
    assert "\n" not in message, message
    assert len(message) <= LONGEST_MESSAGE, message[:200]
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        names = "|".join(sorted({name.removesuffix("s") for name in field_names(method.input_type)}))
        assert re.search(rf"\b({names})", message), f"it names no field: {message}"


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_call_is_served_or_refused_with_what_is_wrong(daemon: Daemon, method: MethodDescriptor) -> None:
    @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def play(data: st.DataObject) -> None:
        sent = data.draw(requests(method))
        sandbox = daemon.living()
        for message in sent:
            living(message, sandbox)
        try:
            daemon.call(method, sent)
        except grpc.RpcError as error:
            check(error, method)
        else:
            daemon.as_before()

    play()


@pytest.mark.parametrize(
    ("name", "sent", "reason"),
    [
        ("GetSandbox", pb.GetSandboxRequest(name="\u2603" * 30_000), "must look like sandboxes/NAME"),
        ("GetPool", pb.GetPoolRequest(name="pools/" + "p" * 70_000), "; this daemon has: python"),
        ("ListSandboxes", pb.ListSandboxesRequest(page_token="9" * 5000), "is not valid"),
        ("ListSandboxes", pb.ListSandboxesRequest(page_size=-1), "is not valid"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_long_name_leaves_what_is_said_of_it(daemon: Daemon, name: str, sent: Message, reason: str) -> None:
    (method,) = (method for method in METHODS if method.name == name)
    with pytest.raises(grpc.RpcError, match=re.escape(reason)) as raised:
        daemon.call(method, [sent])
    check(raised.value, method)


def test_a_program_whose_name_is_no_text_is_not_started(daemon: Daemon) -> None:
    (method,) = (method for method in METHODS if method.name == "RunCommand")
    request = pb.ExecCommandRequest(name=daemon.living(), argv=[b"no-\xff"], output_limit_bytes=9)
    (reply,) = daemon.call(method, [request])
    assert reply.events[-1].exited.detail == "no-\ufffd: No such file or directory"


@given(st.text(max_size=3000), st.dictionaries(st.text(max_size=9), st.text(max_size=6000), max_size=4))
def test_what_is_fitted_can_be_sent(message: str, metadata: dict[str, str]) -> None:
    said, kept = fitted(message, metadata)
    escaped = len(quote(said).encode())
    info = error_details_pb2.ErrorInfo(metadata=kept)
    assert escaped + len(base64.b64encode(info.SerializeToString() + said.encode())) < 8000
    assert kept.keys() == metadata.keys()
    if len(one_line(message).encode()) <= 1000:
        assert said == one_line(message)


def test_a_log_keeps_its_end_and_a_message_both() -> None:
    said, kept = fitted("begin " + "x" * 9000 + " end", {"log": "x" * 9000 + "last", "sandbox": "p-1"})
    assert said.startswith("begin xx")
    assert said.endswith("xx end")
    assert kept["log"].endswith("xxlast")
    assert kept["sandbox"] == "p-1"
