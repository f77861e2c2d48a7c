"""Brings one sandbox up: bounded, classified retries, with the starting slot free between two attempts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception
from tenacity.stop import stop_base
from tenacity.wait import wait_base, wait_random_exponential

from sandboxd import stopwatch
from sandboxd.backends.base import Backend, Connection
from sandboxd.clock import Clock
from sandboxd.errors import BackendUnavailable, Phase, SandboxdError, SandboxLost, StartFailed
from sandboxd.gate import Gate
from sandboxd.lifetime import faults_become
from sandboxd.pacing import Pace
from sandboxd.telemetry.recorder import NOTHING, step
from sandboxd.types import Command, Exited, ExitReason, Stderr, Stdout, Template

logger = logging.getLogger(__name__)

SETUP_LOG_BYTES = 4096
# So many attempts of one start may meet a backend that is away: were it the sandbox that ends it, each would
# take all others down with it.
AWAY_LIMIT = 12


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often, for how long and after what pauses a start is tried again.

    `attempts` counts the first one, and none that met a backend that was away; no attempt begins when
    `budget` seconds have passed since the first of these began. Pauses are drawn uniformly from 0 to
    `pause · 2ⁿ`, at most `pause_limit` seconds (full jitter), and come after what a failure itself says must
    pass first: a registry's rate limit, say.
    """

    attempts: int = 3
    budget: float = 90.0
    pause: float = 0.25
    pause_limit: float = 8.0


class _Stop(stop_base):
    """Stops by attempts or by the injected clock, whichever comes first; `errors` are those met so far, and
    `begin` when the first attempt began that a backend was there for.
    """

    def __init__(
        self, policy: RetryPolicy, clock: Clock, begin: float, errors: Sequence[StartFailed]
    ) -> None:
        self._policy, self._clock, self.begin, self._errors = policy, clock, begin, errors

    def __call__(self, retry_state: RetryCallState) -> bool:
        spent = self._clock.now() - self.begin + retry_state.upcoming_sleep
        away = sum(met_no_backend(error) for error in self._errors)
        used = len(self._errors) - away
        return used >= self._policy.attempts or away >= AWAY_LIMIT or spent >= self._policy.budget


class _Wait(wait_base):
    """Pauses as `RetryPolicy` says."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._drawn = wait_random_exponential(multiplier=policy.pause, max=policy.pause_limit)

    def __call__(self, retry_state: RetryCallState) -> float:
        error = retry_state.outcome and retry_state.outcome.exception()
        first = error.retry_after or 0.0 if isinstance(error, StartFailed) else 0.0
        return first + self._drawn(retry_state)


def met_no_backend(error: BaseException | None) -> bool:
    """Whether an attempt failed because what runs the sandboxes was away, or ended: no fault of its own."""
    while error is not None:
        if isinstance(error, BackendUnavailable) or (isinstance(error, SandboxLost) and error.with_backend):
            return True
        error = error.__cause__
    return False


def _retryable(error: BaseException) -> bool:
    return isinstance(error, StartFailed) and error.retryable


class _Remains:
    """What an attempt left, whose sandbox was there; `left` is told of what could not be taken away."""

    def __init__(self, backend: Backend, sandbox_id: str, left: Callable[[], None]) -> None:
        self.connection: Connection | None = None
        self._backend = backend
        self._id = sandbox_id
        self._left = left

    def kept(self, keep: Callable[[Connection], bool]) -> bool:
        """Whether somebody wants it."""
        return self.connection is not None and keep(self.connection)

    async def taken_away(self) -> bool:
        """Whether nothing is left, so that its name is free for another attempt."""
        connection, self.connection = self.connection, None
        if connection is None:
            return True
        try:
            with faults_become(BackendUnavailable, f"cleaning up {self._id}"):
                await connection.close()
                await self._backend.destroy(self._id)
        except SandboxdError as error:
            logger.warning("sandbox %s is not cleaned up yet: %s", self._id, error.message)
            self._left()
            return False
        except BaseException:
            # Cancelled once more. Not waited for: a backend that hangs would hold up whoever cancels.
            self._left()
            raise
        return True

    async def end_if_cancelled(self, error: StartFailed) -> None:
        """Raises CancelledError: what is met while a cancelled attempt is cleaned up would take its
        place, and have the start tried again.
        """
        task = asyncio.current_task()
        if task is None or not task.cancelling():
            return
        if self.connection is None:
            self._left()
        await self.taken_away()
        raise asyncio.CancelledError from error


class _Faults:
    """Raises what `failure` makes of whatever is no StartFailed. One serves all starts."""

    __slots__ = ("_failure",)

    def __init__(self, failure: Callable[[Exception], StartFailed]) -> None:
        self._failure = failure

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, StartFailed):
            raise self._failure(error) from error


class Starter:
    """Starts sandboxes of one template on one backend, and tells `pace` how each attempt went.

    `is_prepared` once the backend has fetched the image, say, for the first of them; then `on_prepared` is
    called.
    """

    def __init__(
        self,
        backend: Backend,
        template: Template,
        policy: RetryPolicy,
        clock: Clock,
        pace: Pace,
        on_prepared: Callable[[], None] = lambda: None,
    ) -> None:
        self.is_prepared = False
        self._backend = backend
        self._template = template
        self._policy = policy
        self._clock = clock
        self._pace = pace
        self._gate = Gate()
        self._fault = ""
        self._faults = _Faults(self._failure)
        self._on_prepared = on_prepared

    async def start(
        self,
        sandbox_id: str,
        *,
        between: Callable[[float], Awaitable[None]],
        failed: Callable[[StartFailed, int], None] = lambda _error, _attempt: None,
        keep: Callable[[Connection], bool] = lambda _: False,
        left: Callable[[], None] = lambda: None,
    ) -> Connection:
        """Returns a connection to a ready sandbox.

        `failed(error, attempt)` is called after each attempt that failed, the first one is 1. Then
        `between(pause)` is awaited if it will be repeated: it sleeps, and gives the starting slot back for
        that time. `keep(connection)` says whether a sandbox stays that was there, but whose setup failed in
        the last attempt. `left()` is called before an error, or a cancellation, that could not be cleaned up
        after: whoever called destroys the sandbox. Raises StartFailed naming every attempt.
        """
        history: list[str] = []
        errors: list[StartFailed] = []
        remains = _Remains(self._backend, sandbox_id, left)
        stop = _Stop(self._policy, self._clock, self._clock.now(), errors)

        async def attempt() -> Connection:
            begin = self._clock.now()
            if errors and met_no_backend(errors[-1]):
                # It may have been away for longer than the budget.
                stop.begin = begin
            try:
                with step("start attempt", {"sandboxd.attempt": len(history) + 1}):
                    return await self._attempt(sandbox_id, remains)
            except StartFailed as error:
                await remains.end_if_cancelled(error)
                errors.append(error)
                spent = self._clock.now() - begin
                history.append(f"{error.phase} after {spent:.2f} s: {error.message}")
                failed(error, len(history))
                raise

        async def pause(seconds: float) -> None:
            if not await remains.taken_away():
                raise errors[-1]
            await between(seconds)

        try:
            # Most starts need nothing that counts attempts.
            return await attempt()
        except StartFailed as error:
            first = error
        try:
            return await self._retried(first, attempt, stop, pause)
        except StartFailed as error:
            if not remains.kept(keep):
                await remains.taken_away()
            raise self._summed_up(error, history) from error

    async def _retried(
        self,
        first: StartFailed,
        attempt: Callable[[], Awaitable[Connection]],
        stop: _Stop,
        between: Callable[[float], Awaitable[None]],
    ) -> Connection:
        """Goes on after the `first` attempt has failed."""
        failures = [first]

        async def next_attempt() -> Connection:
            if failures:
                raise failures.pop()
            return await attempt()

        retrying = AsyncRetrying(
            stop=stop,
            wait=_Wait(self._policy),
            retry=retry_if_exception(_retryable),
            sleep=between,
            reraise=True,
        )
        return await retrying(next_attempt)

    def _summed_up(self, error: StartFailed, history: list[str]) -> StartFailed:
        attempts = "; ".join(f"attempt {n}: {line}" for n, line in enumerate(history, 1))
        return StartFailed(
            f"no sandbox of template {self._template.name!r} could be started ({attempts})",
            phase=error.phase,
            retryable=error.retryable,
            retry_after=error.retry_after or self._policy.pause_limit if error.retryable else None,
            metadata={**error.metadata, "attempts": str(len(history))},
        )

    async def _attempt(self, sandbox_id: str, remains: _Remains) -> Connection:
        stopwatch.attempt()
        stopwatch.enter(Phase.PULL)
        await self._prepare()
        stopwatch.enter(Phase.CREATE)
        # A pull says nothing about how many can be started at once.
        measured, ok = self._pace.begin(self._clock.now()), None
        try:
            connection = await self._bring_up(sandbox_id, remains)
            ok = True
        except StartFailed as error:
            # What no repetition mends is the template's fault and not the host's; and a backend that is away
            # says nothing about how many the host can start when it is back.
            ok = False if error.retryable and not met_no_backend(error) else None
            raise
        finally:
            self._pace.end(measured, self._clock.now(), ok=ok)
        return connection

    async def _prepare(self) -> None:
        with self._faults, step("prepare"):
            await self._backend.prepare(self._template)
        if not self.is_prepared:
            self.is_prepared = True
            self._on_prepared()

    def _failure(self, error: Exception) -> StartFailed:
        """Whatever it is, it is an attempt that failed; a fault of the backend's own code may be one, too."""
        if isinstance(error, TimeoutError):
            limit = self._template.start_timeout
            return StartFailed(f"not ready within {limit:g} s", phase=Phase.READY)
        if isinstance(error, SandboxdError):
            return StartFailed(error.message, phase=error.phase, metadata=error.metadata)
        what = f"{type(error).__name__}: {error}"
        if what != self._fault:
            # Hundreds of starts may meet the same.
            self._fault = what
            logger.error("starting a sandbox of template %r", self._template.name, exc_info=error)
        return StartFailed(what)

    async def _bring_up(self, sandbox_id: str, remains: _Remains) -> Connection:
        with self._faults, step("bring up"):
            async with self._clock.timeout(self._template.start_timeout):
                connection = await self._backend.create(sandbox_id, self._template)
        remains.connection = connection
        try:
            # Many may end in one turn of the event loop, and what follows is most of what a start costs it.
            await self._gate.passed()
            with step("setup") if self._template.setup else NOTHING:
                await self.set_up(connection)
        except StartFailed:
            # Whoever knows whether there is another attempt takes it away, or keeps it.
            raise
        except BaseException:
            await remains.taken_away()
            raise
        return connection

    async def set_up(self, connection: Connection) -> None:
        """Runs the template's setup, if it has one. Raises StartFailed."""
        if not self._template.setup:
            return
        stopwatch.enter(Phase.SETUP)
        command = Command(argv=self._template.setup, timeout=self._template.start_timeout)
        log, exited = b"", None
        try:
            async with connection.exec(command) as events:
                async for event in events:
                    if isinstance(event, Stdout | Stderr):
                        log = (log + event.data)[-SETUP_LOG_BYTES:]
                    elif isinstance(event, Exited):
                        exited = event
        except SandboxdError as error:
            raise StartFailed(f"setup: {error.message}", phase=Phase.SETUP) from error
        if exited is None or exited.reason is not ExitReason.EXITED or exited.exit_code:
            ending = "no end" if exited is None else f"{exited.reason.name} {exited.exit_code}"
            raise StartFailed(
                f"setup ended with {ending}",
                phase=Phase.SETUP,
                retryable=exited is None or exited.reason in (ExitReason.TIMED_OUT, ExitReason.SIGNALED),
                metadata={"log": log.decode(errors="replace")},
            )


def faults_fail_the_start(doing: str, *, known: type[SandboxdError]) -> faults_become:
    """A fault of our own code must not take the other sandboxes down with it, nor send away those who wait
    for others: nobody knows that another start would meet it. `known` passes.
    """
    return faults_become(StartFailed, doing, known=known)
