"""Whether a backend answers: looked at now and then, at once when a start fails, and until it is back."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from sandboxd.backends.base import Backend
from sandboxd.changes import Changes
from sandboxd.clock import Clock
from sandboxd.errors import BackendUnavailable
from sandboxd.lifetime import faults_become, first_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Looks:
    """How often a backend is looked at, in seconds.

    Every `every` while it answers. What gives no answer within `answer` is unavailable; it is looked at again
    after `pause`, which doubles up to `pause_limit`. Callers wait `patience` for it to come back.
    """

    every: float = 10.0
    answer: float = 10.0
    pause: float = 0.25
    pause_limit: float = 5.0
    patience: float = 10.0


class Availability:
    """Of one backend. While it is unavailable nothing is started on it, and destructions wait.

    `error` says why it is unavailable, None while it is not. `refusal` is what callers hear that cannot be
    given a ready sandbox, once it has been unavailable for longer than they are to wait.
    """

    def __init__(self, backend: Backend, clock: Clock, looks: Looks | None = None) -> None:
        self.name = backend.name
        self.error: BackendUnavailable | None = None
        self.refusal: BackendUnavailable | None = None
        self.changes = Changes()
        self._backend = backend
        self._clock = clock
        self._looks = looks or Looks()
        self._suspected = asyncio.Event()
        self._since = 0.0

    def suspect(self) -> None:
        """Something failed on it: it is looked at soon."""
        self._suspected.set()

    async def back(self) -> None:
        """Returns when it is not unavailable."""
        with self.changes.watched() as changed:
            while self.error is not None:
                changed.clear()
                await changed.wait()

    async def run(self) -> None:
        """Looks at it, for ever."""
        looks, pause = self._looks, self._looks.pause
        while True:
            self._suspected.clear()
            begin = self._clock.now()
            error = await self._look()
            self._note(error, begin)
            if error is None:
                pause = looks.pause
                # Many starts may fail at once: one look is enough for them.
                await self._clock.sleep(looks.pause)
                await first_of(self._suspected.wait(), self._clock.sleep(looks.every))
            else:
                await self._pause(pause)
                pause = min(2 * pause, looks.pause_limit)

    async def _look(self) -> BackendUnavailable | None:
        try:
            async with self._clock.timeout(self._looks.answer):
                with faults_become(BackendUnavailable, f"looking at {self.name}", known=BackendUnavailable):
                    await self._backend.check()
        except TimeoutError:
            seconds = self._looks.answer
            return BackendUnavailable(f"the {self.name} backend gave no answer within {seconds:g} s")
        except BackendUnavailable as error:
            return error
        return None

    def _note(self, error: BackendUnavailable | None, begin: float) -> None:
        before, self.error = self.error, error
        if error is None:
            self.refusal = None
            if before is not None:
                away = self._clock.now() - self._since
                logger.warning("the %s backend is there again, after %.1f s", self.name, away)
                self.changes.tell()
            return
        if before is None:
            self._since = begin
            logger.error("the %s backend is unavailable: %s", self.name, error.message)
            self.changes.tell()
        self._refuse_in_time()

    async def _pause(self, seconds: float) -> None:
        """Not beyond the time that callers wait: they hear of a look that was made then."""
        if self.refusal is None:
            seconds = min(seconds, max(0.0, self._since + self._looks.patience - self._clock.now()))
        await self._clock.sleep(seconds)

    def _refuse_in_time(self) -> None:
        if self.error is None or self._clock.now() - self._since < self._looks.patience:
            return
        told = self.refusal is not None
        self.refusal = BackendUnavailable(self.error.message, retry_after=self._looks.pause_limit)
        if not told:
            self.changes.tell()
