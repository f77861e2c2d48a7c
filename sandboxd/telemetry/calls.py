"""The calls of a gRPC server: a span and a duration for each, by the semantic conventions for RPC.

Wrapped around the handlers and not an interceptor: that is asked anew for each call, and this once a method.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import grpc
from opentelemetry.trace import SpanKind

from sandboxd.errors import Cause, SandboxdError
from sandboxd.status import code_of
from sandboxd.telemetry.counting import Histogram
from sandboxd.telemetry.recorder import Value, current
from sandboxd.telemetry.spans import Common, Context, Span, Spans, failure, parsed
from sandboxd.types import POOL_PREFIX, SANDBOX_PREFIX
from sandboxd.v1 import sandbox_service_pb2 as pb

# Those that semantic conventions take for faults of the server; others are the caller's.
FAULTS = {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
ENDINGS = {value: name for name, value in pb.CommandExited.Reason.items()}

Handler = Callable[..., Any]


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

    def command(self, sandbox: str, ending: str, ended: pb.CommandExited) -> None:
        """One has ended. The name of a sandbox begins with that of its pool."""
        pool = sandbox.rpartition("-")[0]
        wall = ended.wall_duration
        self.commands.add(wall.seconds + wall.nanos / 1e9, (pool, ending))


class Calls:
    """Records the calls of the services whose handlers it is given. Without `spans` only their durations."""

    def __init__(self, spans: Spans | None, durations: Durations | None) -> None:
        self.spans, self.durations = spans, durations

    def observed(self, handlers: grpc.GenericRpcHandler) -> grpc.GenericRpcHandler:
        """The same handlers, with this around each."""
        return cast("grpc.GenericRpcHandler", _Observed(handlers, self))


class _Observed:
    def __init__(self, handlers: grpc.GenericRpcHandler, calls: Calls) -> None:
        self._handlers, self._calls = handlers, calls
        self._by_method: dict[str, Any] = {}

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        """The handler of a method; None where there is none."""
        method = str(details.method)
        if method not in self._by_method:
            handler = self._handlers.service(details)
            if handler is None:
                # Not remembered: what callers make up has no end.
                return None
            self._by_method[method] = _wrapped(handler, method.lstrip("/"), self._calls)
        return self._by_method[method]


def _wrapped(handler: Any, name: str, calls: Calls) -> Any:
    kind = f"{'stream' if handler.request_streaming else 'unary'}_"
    kind += "stream" if handler.response_streaming else "unary"
    inner = getattr(handler, kind)
    around = _streaming if inspect.isasyncgenfunction(inner) else _single
    make = getattr(grpc, f"{kind}_rpc_method_handler")
    wrapped = around(inner, _Method(name, calls))
    return make(wrapped, handler.request_deserializer, handler.response_serializer)


class _Method:
    """One method, and where its messages say what it is about."""

    def __init__(self, name: str, calls: Calls) -> None:
        self.name, self.calls = name, calls
        service, _, short = name.rpartition("/")
        described = pb.DESCRIPTOR.services_by_name.get(service.rpartition(".")[2])
        method = described.methods_by_name.get(short) if described is not None else None
        fields = () if method is None else tuple(method.input_type.fields_by_name)
        # What a stream of requests is about is said by its first, which the handler reads.
        self.fields = () if method is not None and method.client_streaming else fields
        self.begins = Common(name, SpanKind.SERVER, {"rpc.system.name": "grpc", "rpc.method": name})
        self._ends: dict[tuple[str, str, int], Common] = {}

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

    def of_request(self, request: Any) -> dict[str, Value]:
        """The sandbox, the pool and the file that a request names."""
        told: dict[str, Value] = {}
        for field in ("name", "pool", "path"):
            if field in self.fields and (value := getattr(request, field)):
                told.update(_named(value))
        return told


def _named(value: Any) -> dict[str, Value]:
    if isinstance(value, bytes):
        return {"file.path": value.decode(errors="replace")}
    if not isinstance(value, str):
        return {}
    if value.startswith(SANDBOX_PREFIX):
        return {"sandboxd.sandbox": value[len(SANDBOX_PREFIX) :]}
    if value.startswith(POOL_PREFIX):
        return {"sandboxd.pool": value[len(POOL_PREFIX) :]}
    return {}


def _single(inner: Handler, method: _Method) -> Handler:
    async def handle(request: Any, context: Any) -> Any:
        call = _Call(method, context)
        try:
            response = await inner(request, context)
        except BaseException as error:
            call.failed(request, error)
            raise
        call.succeeded(request, response)
        return response

    return handle


def _streaming(inner: Handler, method: _Method) -> Handler:
    async def handle(request: Any, context: Any) -> AsyncIterator[Any]:
        call, response = _Call(method, context), None
        try:
            async for response in inner(request, context):
                yield response
        except BaseException as error:
            call.failed(request, error)
            raise
        call.succeeded(request, response)

    return handle


class _Call:
    """One call. Its span is the current one of its task, which serves nothing else."""

    __slots__ = ("_begun", "_method", "_span")

    def __init__(self, method: _Method, context: Any) -> None:
        self._method, self._begun = method, time.perf_counter_ns()
        self._span: Span | None = None
        if method.calls.spans is not None:
            self._span = method.calls.spans.begin(method.begins, _caller(context))
            current.set(self._span)

    def succeeded(self, request: Any, response: Any) -> None:
        """`response` is the last one; None where there was none, or it went another way."""
        ending, exit_code, method = "", 0, self._method
        told = method.of_request(request)
        match response:
            case pb.RunCommandResponse() | pb.ExecCommandResponse():
                if (ended := _ended(response)) is not None:
                    ending, exit_code = ENDINGS.get(ended.reason, ""), ended.exit_code
                    if method.calls.durations is not None:
                        method.calls.durations.command(str(told.get("sandboxd.sandbox", "")), ending, ended)
            case pb.WriteFileResponse():
                told["file.size"] = response.size_bytes
            case pb.Sandbox():
                told["sandboxd.sandbox"] = response.name.removeprefix(SANDBOX_PREFIX)
        self._end(told, method.common("OK", ending, exit_code))

    def failed(self, request: Any, error: BaseException) -> None:
        """It ends with an error, or because its caller has left."""
        fault = _fault(error)
        code = _code(fault)
        told = self._method.of_request(request)
        more, words = failure(fault)
        told.update(more)
        # What the caller did wrong is not the server's failure.
        if self._span is not None and (
            code in FAULTS or getattr(fault, "cause", None) is Cause.INFRASTRUCTURE
        ):
            self._span.fault = words
        self._end(told, self._method.common(code), str(more["error.type"]))

    def _end(self, told: dict[str, Value], common: Common, error: str = "") -> None:
        elapsed, calls = time.perf_counter_ns() - self._begun, self._method.calls
        if calls.durations is not None:
            code = str(common.attributes["rpc.response.status_code"])
            calls.durations.calls.add(elapsed / 1e9, ("grpc", self._method.name, code, error))
        span = self._span
        if span is not None and calls.spans is not None:
            span.common = common
            span.attributes.update(told)
            calls.spans.end(span, span.begun + elapsed)


def _caller(context: Any) -> Context | None:
    for key, value in context.invocation_metadata() or ():
        if key == "traceparent":
            return parsed(value)
    return None


def _ended(response: Any) -> pb.CommandExited | None:
    """How a command ended, where this is the last that is told of it."""
    if isinstance(response, pb.RunCommandResponse):
        response = response.events[-1] if response.events else pb.ExecCommandResponse()
    return response.exited if response.HasField("exited") else None


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
