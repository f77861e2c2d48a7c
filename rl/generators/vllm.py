"""The real generator: vLLM's AsyncLLM in its own process, fed token ids, updated in flight."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rl.generator import Generation, GeneratorDead, GeneratorStats, Sampling, UpdateFailed, check_fits
from rl.generators.checks import check_weights, segment_identity
from rl.generators.engine_stats import EngineStats
from rl.generators.surroundings import (
    applied_environment,
    engine_environment,
    output_to,
    write_log_config,
)
from rl.precision import Precision
from rl.processes import ended_with_this, kill_writers
from rl.types import TokenIds, VersionSpan

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.outputs import CompletionOutput
    from vllm.v1.engine.async_llm import AsyncLLM

GIB = 1 << 30

SCRATCH_PREFIX = "vllm-"
"""Short: below it lie sockets, whose paths the kernel limits to 107 bytes."""


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """How to start the engine.

    `max_context` is in tokens, prompt and continuation together; `kv_cache_bytes` the memory for
    keys and values; `in_core` runs the model in the engine's own process; `start_seconds` and
    `update_seconds` bound the start and one weight update. vLLM's own log goes to `log_path`.
    """

    model: Path
    log_path: Path
    seed: int = 0
    max_concurrent: int = 64
    max_context: int = 1024
    kv_cache_bytes: int = GIB
    compiled: bool = False
    precision: Precision = "float32"
    in_core: bool = True
    start_seconds: float = 180.0
    update_seconds: float = 60.0


def start_engine(settings: VllmSettings, stats: EngineStats) -> AsyncLLM:
    """Start the engine's processes and load the model; takes 15 to 40 s on two cores. `stats` is kept up."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from rl.generators.in_core import InCoreExecutor

    arguments = AsyncEngineArgs(
        model=str(settings.model),
        dtype=settings.precision,
        seed=settings.seed,
        enforce_eager=not settings.compiled,
        max_model_len=settings.max_context,
        max_num_seqs=settings.max_concurrent,
        kv_cache_memory_bytes=settings.kv_cache_bytes,
        # Smaller blocks share more: with the CPU default of 128, the tail of a prompt that fills no
        # whole block is computed again for every sample and every turn. 32 is the kernel's smallest.
        block_size=32,
        enable_prefix_caching=True,
        worker_extension_cls="rl.generators.reload.Reload",
        disable_log_stats=True,
        # As a class, since the name "uni" is turned into "mp" on CPUs, where the engine's core would spin
        # on shared memory for a worker process: a third of a core, taken from the workers themselves.
        distributed_executor_backend=InCoreExecutor if settings.in_core else None,
    )
    return AsyncLLM.from_engine_args(arguments, stat_loggers=[stats])


class VllmGenerator:
    """Draws through one AsyncLLM. Build it with `open_vllm`, which also closes it.

    A request that is cancelled is aborted in the engine. Weight updates stop the engine between two
    forward passes and keep the running requests, which go on with the new weights.
    """

    def __init__(self, engine: AsyncLLM, settings: VllmSettings, stats: EngineStats) -> None:
        self._stats = stats
        self._open_engine: AsyncLLM | None = engine
        self._broken = False
        self._segment: tuple[int, int] | None = None
        self._settings = settings
        self._version = 0
        self._names = itertools.count()
        self._updating = asyncio.Lock()
        self._running = self._finished = self._updates = 0
        self._prompt_tokens = self._cached_tokens = self._generated_tokens = 0
        self._busy_seconds = self._paused_seconds = self._busy_since = 0.0

    @property
    def version(self) -> int:
        return self._version

    @property
    def _engine(self) -> AsyncLLM:
        if self._open_engine is None or self._broken:
            raise GeneratorDead("the generator is closed, or a weight update broke it")
        return self._open_engine

    async def warm_up(self) -> None:
        """Asks what vLLM would ask at the first request, waiting without end should the engine die meanwhile.

        Raises GeneratorDead.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            async with asyncio.timeout(self._settings.start_seconds):
                await self._engine.get_supported_tasks()
        except (EngineDeadError, TimeoutError) as error:
            raise GeneratorDead(f"the vLLM engine died; its log is {self._settings.log_path}") from error

    def close(self) -> None:
        """End the engine; no call may still wait. Later calls end with GeneratorDead.

        The engine is let go of here: its destructor would fail among modules that are already taken
        apart when the interpreter ends.
        """
        if self._open_engine is not None:
            self._open_engine.shutdown()
            self._open_engine = None

    async def generate(self, context_ids: TokenIds, sampling: Sampling) -> Generation:
        from vllm.inputs import TokensPrompt
        from vllm.v1.engine.exceptions import EngineDeadError

        check_fits(context_ids, sampling, self._settings.max_context)
        # The salt keeps keys and values that old weights computed from serving new requests.
        prompt = TokensPrompt(prompt_token_ids=context_ids.tolist(), cache_salt=f"v{self._version}")
        self._begin(len(context_ids))
        try:
            output = await self._last_output(prompt, sampling)
        except EngineDeadError as error:
            raise GeneratorDead(f"the vLLM engine died; its log is {self._settings.log_path}") from error
        finally:
            self._end()
        if self._broken:
            raise GeneratorDead("the generator is closed, or a weight update broke it")
        self._finished += 1
        self._generated_tokens += len(output.token_ids)
        return to_generation(output)

    async def _last_output(self, prompt: TokensPrompt, sampling: Sampling) -> CompletionOutput:
        parameters = to_parameters(sampling)
        last = None
        async for result in self._engine.generate(prompt, parameters, f"r{next(self._names)}"):
            last = result
        if last is None:
            raise GeneratorDead("the vLLM engine ended a request without any output")
        self._cached_tokens += last.num_cached_tokens or 0
        return last.outputs[0]

    async def update_weights(self, path: Path, version: int) -> None:
        async with self._updating:
            if version <= self._version:
                raise UpdateFailed(f"weights {version} are not newer than weights {self._version}")
            await asyncio.to_thread(check_weights, path, self._settings.model, version)
            try:
                async with asyncio.timeout(self._settings.update_seconds):
                    await self._change(path, version)
            except Exception as error:  # what fails in the engine's core arrives as an Exception, no narrower
                self._broken = True
                raise GeneratorDead(
                    f"the vLLM engine failed at weights {version} ({error!r}); its log is "
                    f"{self._settings.log_path}"
                ) from error
            self._updates += 1

    async def _change(self, path: Path, version: int) -> None:
        """Swap the weights under the paused engine, which runs on whatever happens.

        Until `pause_generation` returns, the engine finishes the forward pass that it is in: it stands still
        only from then on.
        """
        engine = self._engine
        segment = await asyncio.to_thread(segment_identity, path)
        if segment is not None:
            await self.prepare(path, version)
        stopped, changing = None, False
        try:
            await engine.pause_generation(mode="keep", clear_cache=False)
            stopped = time.monotonic()
            changing = True
            if segment is None:
                paths = {"weights_path": str(path), "base_path": str(self._settings.model)}
                await engine.collective_rpc("reload_all_weights", kwargs=paths)
                await engine.update_weight_version(str(version))
            else:
                await self._transfer(engine, version)
            changing = False
            # Before it goes on: whoever gives the update up now has given it new weights all the same.
            self._version = version
        finally:
            # However it was broken off, by a cancellation too: what it holds now is unknown, so nothing that
            # it draws could be trained on.
            self._broken |= changing
            try:
                # Shielded: a pause that outlives its update stops every request for ever.
                await asyncio.shield(engine.resume_generation())
            finally:
                if stopped is not None:
                    self._paused_seconds += time.monotonic() - stopped

    async def prepare(self, path: Path, version: int) -> None:
        """Does what can be done of an update from a segment while the engine draws; called by
        `update_weights`. What was prepared for another version is dropped."""
        engine, segment = self._engine, await asyncio.to_thread(segment_identity, path)
        if segment != self._segment:
            await engine.collective_rpc("take_from", kwargs={"segment_path": str(path)})
            self._segment = segment
        if self._settings.in_core:
            await engine.collective_rpc("prepare", kwargs={"version": version})

    async def _transfer(self, engine: AsyncLLM, version: int) -> None:
        """vLLM's own sequence of calls, which ends by setting the version."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await engine.start_weight_update()
        await engine.update_weights(WeightTransferUpdateRequest({"version": version}))
        await engine.finish_weight_update(str(version))

    async def pulse(self) -> int:
        """How often the engine computed a pass."""
        return self._stats.passes

    def stats(self) -> GeneratorStats:
        busy = self._busy_seconds
        if self._running:
            busy += time.monotonic() - self._busy_since
        return GeneratorStats(
            running=self._running,
            finished=self._finished,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens=self._generated_tokens,
            busy_seconds=busy,
            paused_seconds=self._paused_seconds,
            updates=self._updates,
            kv_cache_usage=self._stats.kv_cache_usage if self._running else 0.0,
            queued=self._stats.queued if self._running else 0,
            preemptions=self._stats.preemptions,
        )

    def _begin(self, prompt_tokens: int) -> None:
        if not self._running:
            self._busy_since = time.monotonic()
            self._stats.rested()
        self._running += 1
        self._prompt_tokens += prompt_tokens

    def _end(self) -> None:
        self._running -= 1
        if not self._running:
            self._busy_seconds += time.monotonic() - self._busy_since


def to_parameters(sampling: Sampling) -> SamplingParams:
    """vLLM's form of `sampling`. The run is seeded, not the request: on a CPU that kills the engine."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop=list(sampling.stop),
        logprobs=0,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_special_tokens=False,
    )


def to_generation(output: CompletionOutput) -> Generation:
    """Tokens, log-probabilities (NaN where the engine gave none) and version spans of a finished request."""
    ids = np.array(output.token_ids, dtype=np.int32)
    drawn = output.logprobs or [{}] * len(ids)
    logprobs = np.array(
        [
            entry[token].logprob if token in entry else np.nan
            for token, entry in zip(output.token_ids, drawn, strict=True)
        ],
        dtype=np.float32,
    )
    spans = tuple(
        VersionSpan(0 if span.version == "default" else int(span.version), span.start, span.end)
        for span in output.weight_versions or ()
    )
    return Generation(ids, logprobs, spans, "length" if output.finish_reason == "length" else "stop")


@asynccontextmanager
async def open_vllm(settings: VllmSettings) -> AsyncIterator[VllmGenerator]:
    """Start an engine for the length of the block, or of this process's life if that is shorter.

    Raises GeneratorDead when it does not start, or not in time.
    """
    log_config = write_log_config(settings.log_path)
    with ExitStack() as held:
        temporary = tempfile.TemporaryDirectory(prefix=SCRATCH_PREFIX, ignore_cleanup_errors=True)
        scratch = Path(held.enter_context(temporary))
        held.enter_context(ended_with_this(settings.log_path, scratch))
        with ExitStack() as around:
            variables = engine_environment(log_config, scratch, compiled=settings.compiled)
            around.enter_context(applied_environment(variables))
            around.enter_context(output_to(settings.log_path))
            start = _Start(settings)
            try:
                generator = VllmGenerator(await start.finish(), settings, start.stats)
            except BaseException:
                start.abandon(around.pop_all(), held.pop_all())
                raise
        try:
            await generator.warm_up()
            yield generator
        finally:
            generator.close()


class _Start:
    """An engine's start, in a thread that nothing can end from outside."""

    def __init__(self, settings: VllmSettings) -> None:
        self._settings = settings
        self.stats = EngineStats()
        # Handed over in a list, not returned: the thread's frames outlive it, for vLLM keeps one of them, and
        # would keep the engine until the interpreter ends.
        self._started: list[AsyncLLM] = []
        self._left: list[ExitStack] = []
        self._over = False

    async def finish(self) -> AsyncLLM:
        """Waits for the engine. Raises GeneratorDead."""
        log = self._settings.log_path
        try:
            async with asyncio.timeout(self._settings.start_seconds):
                await asyncio.to_thread(self._run)
            return self._started.pop()
        except TimeoutError:
            await asyncio.to_thread(kill_writers, log)  # the thread that waits for them then ends too
            raise GeneratorDead(
                f"the vLLM engine did not start within {self._settings.start_seconds:g} s; its log is {log}"
            ) from None
        except RuntimeError as error:
            raise GeneratorDead(f"the vLLM engine did not start ({error}); its log is {log}") from error

    def _run(self) -> None:
        try:
            self._started.append(start_engine(self._settings, self.stats))
        finally:
            self._over = True
            self._clean_up()

    def abandon(self, *surroundings: ExitStack) -> None:
        """Gives up, whether the thread has ended or goes on. It may yet start a process, known to nobody but
        by its output: so what surrounds the start stays until the thread has ended, or this process, and its
        reaper then sees to it.
        """
        self._left += surroundings
        if self._over:
            self._clean_up()

    def _clean_up(self) -> None:
        """After an abandoned start, by whoever comes last."""
        if not self._left:
            return
        with suppress(IndexError):  # the other of the two was faster
            while self._started:
                self._started.pop().shutdown()
            kill_writers(self._settings.log_path)
            while self._left:
                self._left.pop(0).close()
