"""The calls of a gRPC server: a span and a duration for each, by the semantic conventions for RPC.

Wrapped around the handlers and not an interceptor: that is asked anew for each call, and this once a method.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from time import perf_counter_ns
from typing import Any, cast

import grpc
from opentelemetry.trace import SpanKind

from sandboxd.errors import Cause, SandboxdError
from sandboxd.status import code_of
from sandboxd.telemetry.counting import Histogram
from sandboxd.telemetry.recorder import Value, current
from sandboxd.telemetry.spans import Common, Span, Spans, failure
from sandboxd.types import POOL_PREFIX, SANDBOX_PREFIX, Exited, ExitReason
from sandboxd.v1 import sandbox_service_pb2 as pb

# Those that semantic conventions take for faults of the server; others are the caller's.
FAULTS = {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
ENDINGS = {value: name for name, value in pb.CommandExited.Reason.items()}

# So many calls that ran a command are worked up together, within this time at the latest.
TOGETHER, LATEST_SECONDS = 64, 0.5

Handler = Callable[..., Any]
# Method, span, nanoseconds; sandbox, and how the command ended.
_Ended = tuple["_Method", Span | None, int, str, Exited]


class Durations:
    """How long calls took, and the commands that they ran."""

    def __init__(self) -> None:
        keys = ("rpc.system.name", "rpc.method", "rpc.response.status_code", "error.type")
        self.calls = Histogram("rpc.server.call.duration", "Duration of an incoming call.", keys)
        self.commands = Histogram(
            "sandboxd.command.duration",
            "Time from a command's start to its end, by pool and by how it ended.",
            ("sandboxd.pool", "sandboxd.command.ending"),
        )

    def command(self, sandbox: str, ending: str, seconds: float) -> None:
        """One has ended. The name of a sandbox begins with that of its pool."""
        self.commands.add(seconds, (sandbox.rpartition("-")[0], ending))


class Calls:
    """Records the calls of the services whose handlers it is given. Without `spans` only their durations.

    What commands leave is worked up some at a time: then it costs half of what each by itself would.
    """

    def __init__(self, spans: Spans | None, durations: Durations | None) -> None:
        self.spans, self.durations = spans, durations
        self._ended: list[_Ended] = []

    def observed(self, handlers: grpc.GenericRpcHandler) -> grpc.GenericRpcHandler:
        """The same handlers, with this around each."""
        return cast("grpc.GenericRpcHandler", _Observed(handlers, self))

    def add(self, ended: _Ended) -> None:
        """A call that ran a command is over."""
        waiting = self._ended
        waiting.append(ended)
        if len(waiting) == TOGETHER:
            self.flush()
        elif len(waiting) == 1:
            asyncio.get_running_loop().call_later(LATEST_SECONDS, self.flush)

    def flush(self) -> None:
        """Works up what waits."""
        ended, self._ended = self._ended, []
        for method, span, elapsed, sandbox, exited in ended:
            ending = exited.reason.value
            if self.durations is not None:
                self.durations.command(sandbox, ending, exited.wall)
                self.durations.calls.add(elapsed / 1e9, method.succeeded)
            if span is not None and self.spans is not None and span.resolved().is_sampled:
                span.common = method.common("OK", ending, exited.exit_code)
                span.attributes["sandboxd.sandbox"] = sandbox
                self.spans.end(span, span.begun + elapsed)


class _Observed:
    def __init__(self, handlers: grpc.GenericRpcHandler, calls: Calls) -> None:
        self._handlers, self._calls = handlers, calls
        self._by_method: dict[str, tuple[Any, _Method]] = {}

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        """The handler of a method; None where there is none. Asked by the task that then serves the call.

        So the call's span begins here: what its caller sent is at hand, which costs more where it is served.
        """
        known = self._by_method.get(details.method)
        if known is None:
            handler = self._handlers.service(details)
            if handler is None:
                # Not remembered: what callers make up has no end.
                return None
            method = _Method(str(details.method).lstrip("/"), self._calls)
            known = self._by_method[details.method] = _wrapped(handler, method), method
        wrapped, method = known
        if method.spans is not None:
            current.set(Span(method.spans, method.begins, details.invocation_metadata))
        return wrapped


def _wrapped(handler: Any, method: _Method) -> Any:
    kind = f"{'stream' if handler.request_streaming else 'unary'}_"
    kind += "stream" if handler.response_streaming else "unary"
    inner = getattr(handler, kind)
    around = _streaming if inspect.isasyncgenfunction(inner) else _single
    make = getattr(grpc, f"{kind}_rpc_method_handler")
    wrapped = around(inner, method)
    return make(wrapped, handler.request_deserializer, handler.response_serializer)


class _Method:
    """One method, and where its messages say what it is about."""

    def __init__(self, name: str, calls: Calls) -> None:
        self.name, self.calls, self.spans, self.durations = name, calls, calls.spans, calls.durations
        service, _, short = name.rpartition("/")
        described = pb.DESCRIPTOR.services_by_name.get(service.rpartition(".")[2])
        method = described.methods_by_name.get(short) if described is not None else None
        # What a stream of requests is about is said by its first, which the handler reads.
        known = () if method is None or method.client_streaming else tuple(method.input_type.fields_by_name)
        self._fields = tuple(field for field in ("name", "pool", "path") if field in known)
        self.names_sandbox = "name" in self._fields
        self.begins = Common(name, SpanKind.SERVER, {"rpc.system.name": "grpc", "rpc.method": name})
        self.succeeded = ("grpc", name, "OK", "")
        self._ends: dict[tuple[str, str, int], Common] = {}

    def about(self, request: Any) -> dict[str, Value]:
        """The sandbox, the pool and the file that a request names."""
        told: dict[str, Value] = {}
        for field in self._fields:
            value = getattr(request, field)
            if isinstance(value, bytes):
                told["file.path"] = value.decode(errors="replace")
            elif value.startswith(SANDBOX_PREFIX):
                told["sandboxd.sandbox"] = value[len(SANDBOX_PREFIX) :]
            elif value.startswith(POOL_PREFIX):
                told["sandboxd.pool"] = value[len(POOL_PREFIX) :]
        return told

    def common(self, code: str, ending: str = "", exit_code: int = 0) -> Common:
        """What all calls say that ended so."""
        known = self._ends.get((code, ending, exit_code))
        if known is not None:
            return known
        told: dict[str, Value] = {**self.begins.attributes, "rpc.response.status_code": code}
        if ending:
            told |= {"sandboxd.command.ending": ending, "process.exit.code": exit_code}
        common = self._ends[code, ending, exit_code] = Common(self.name, SpanKind.SERVER, told)
        return common


def _single(inner: Handler, method: _Method) -> Handler:
    async def handle(request: Any, context: Any) -> Any:
        begun, span = perf_counter_ns(), current.get()
        try:
            response = await inner(request, context)
        except BaseException as error:
            _failed(method, span, begun, request, error)
            raise
        _succeeded(method, span, begun, request, response)
        return response

    return handle


def _streaming(inner: Handler, method: _Method) -> Handler:
    async def handle(request: Any, context: Any) -> AsyncIterator[Any]:
        begun, span, response = perf_counter_ns(), current.get(), None
        try:
            async for response in inner(request, context):
                yield response
        except BaseException as error:
            _failed(method, span, begun, request, error)
            raise
        _succeeded(method, span, begun, request, response)

    return handle


def _succeeded(method: _Method, span: Span | None, begun: int, request: Any, response: Any) -> None:
    """`response` is the last one; None where there was none, or it went another way."""
    elapsed = perf_counter_ns() - begun
    ran = None if span is None else span.ran
    if ran is None and method.names_sandbox and (ended := _ended(response)) is not None:
        ran = request.name[len(SANDBOX_PREFIX) :], ended
    if ran is not None:
        method.calls.add((method, span, elapsed, *ran))
        return
    told = method.about(request)
    match response:
        case pb.WriteFileResponse():
            told["file.size"] = response.size_bytes
        case pb.Sandbox():
            told["sandboxd.sandbox"] = response.name.removeprefix(SANDBOX_PREFIX)
    if method.durations is not None:
        method.durations.calls.add(elapsed / 1e9, method.succeeded)
    if span is not None and method.spans is not None and span.resolved().is_sampled:
        span.common = method.common("OK")
        span.attributes.update(told)
        method.spans.end(span, span.begun + elapsed)


def _failed(method: _Method, span: Span | None, begun: int, request: Any, error: BaseException) -> None:
    """It ends with an error, or because its caller has left."""
    elapsed, fault = perf_counter_ns() - begun, _fault(error)
    code = _code(fault)
    told, words = failure(fault)
    if method.durations is not None:
        method.durations.calls.add(elapsed / 1e9, ("grpc", method.name, code, str(told["error.type"])))
    if span is not None and method.spans is not None and span.resolved().is_sampled:
        # What the caller did wrong is not the server's failure.
        if code in FAULTS or getattr(fault, "cause", None) is Cause.INFRASTRUCTURE:
            span.fault = words
        span.common = method.common(code)
        span.attributes.update(method.about(request))
        span.attributes.update(told)
        method.spans.end(span, span.begun + elapsed)


def _ended(response: Any) -> Exited | None:
    """How a command ended, where this is the last that is told of it and the service has not said so."""
    if type(response) is pb.RunCommandResponse:
        events = response.events
        last = events[-1] if events else None
    else:
        last = response if type(response) is pb.ExecCommandResponse else None
    if last is None or not last.HasField("exited"):
        return None
    told = last.exited
    wall = told.wall_duration.seconds + told.wall_duration.nanos / 1e9
    return Exited(ExitReason(ENDINGS[told.reason]), told.exit_code, wall=wall)


def _fault(error: BaseException) -> BaseException:
    """What a handler met: gRPC's own error that ends it stands before that."""
    met = error.__context__ if isinstance(error, grpc.aio.AbortError) else error
    return met if met is not None else error


def _code(fault: BaseException) -> str:
    match fault:
        case SandboxdError():
            return code_of(fault).name
        case asyncio.CancelledError() | GeneratorExit():
            return "CANCELLED"
        case _:
            return "INTERNAL"
