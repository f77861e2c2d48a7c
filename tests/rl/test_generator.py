"""The real generator on a random Llama of two layers: exact tokens, honest versions, and a clean end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from rl import reaper
from rl.generator import Generation, GeneratorDead, Sampling, UpdateFailed
from rl.generators.vllm import SCRATCH_PREFIX, VllmGenerator, VllmSettings, open_vllm
from rl.model import build_tiny_model
from rl.processes import descendants
from rl.replicas import Patience, open_replicas
from rl.types import TokenIds
from rl.weights import open_segment_file
from tests.rl.engine_kit import PROMPT, Carried, check_cover, reference, weights, write_tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    # torch and vLLM use, while they are imported, what torch itself has deprecated.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::DeprecationWarning:vllm"),
]

LONG = Sampling(max_tokens=400)
END_SECONDS = 30.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    return build_tiny_model(directory / "tiny", write_tokenizer(directory / "tokenizer"))


@pytest.fixture(scope="module")
def settings(model: Path, tmp_path_factory: pytest.TempPathFactory) -> VllmSettings:
    log = tmp_path_factory.mktemp("logs") / "vllm.log"
    return VllmSettings(model=model, log_path=log, max_context=512, kv_cache_bytes=64 << 20)


class Engine:
    """One engine for all tests of the module, on a loop that outlives each of them. `generator` is the engine
    itself, `replicas` what starts it again, in bfloat16, when it has died."""

    def __init__(self, runner: asyncio.Runner, settings: VllmSettings) -> None:
        self._runner = runner
        lower = replace(settings, log_path=settings.log_path.with_name("lower.log"), precision="bfloat16")
        self._settings = [settings, lower]
        self._started: list[VllmGenerator] = []
        self._opened = open_replicas([self._open], Patience(pause_seconds=0.0))
        self.replicas = self.run(self._opened.__aenter__())

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[VllmGenerator]:
        async with open_vllm(self._settings[len(self._started)]) as generator:
            self._started.append(generator)
            yield generator

    def close(self) -> None:
        self.run(self._opened.__aexit__(None, None, None))
        self._started.clear()

    @property
    def generator(self) -> VllmGenerator:
        return self._started[-1]

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(work)

    def generate(self, context: TokenIds = PROMPT, sampling: Sampling = LONG) -> Generation:
        result: Generation = self.run(self.generator.generate(context, sampling))
        return result


@pytest.fixture(scope="module")
def engine(settings: VllmSettings) -> Iterator[Engine]:
    with asyncio.Runner() as runner:
        engine = Engine(runner, settings)
        try:
            yield engine
        finally:
            engine.close()
            del engine
            gc.collect()


@pytest.fixture(params=["directory", "segment"])
def carried(request: pytest.FixtureRequest, model: Path, tmp_path: Path) -> Iterator[Carried]:
    with ExitStack() as stack:
        segment = stack.enter_context(open_segment_file(tmp_path)) if request.param == "segment" else None
        yield Carried(model, segment, tmp_path)


def test_tokens_go_in_and_come_out_with_the_policys_own_logprobs(engine: Engine, model: Path) -> None:
    before = engine.generator.stats()
    drawn = engine.generate()
    check_cover(drawn)
    np.testing.assert_allclose(drawn.logprobs, reference(model, PROMPT, drawn.ids), atol=2e-3)
    assert [span.version for span in drawn.spans] == [0]
    after = engine.generator.stats()
    assert after.prompt_tokens - before.prompt_tokens == len(PROMPT)
    assert after.generated_tokens - before.generated_tokens == len(drawn.ids)
    assert after.running == 0
    assert after.busy_seconds > before.busy_seconds
    engine.generate()
    assert engine.generator.stats().cached_tokens - after.cached_tokens == len(PROMPT) // 32 * 32


def test_a_turn_ends_with_its_stop_text_or_its_end_token_or_its_length(engine: Engine, model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    end = tokenizer.token_to_id("<|im_end|>")
    short = engine.generate(sampling=Sampling(max_tokens=1))
    assert (short.finish_reason, len(short.ids)) == ("length", 1)
    stopped = engine.generate(sampling=Sampling(max_tokens=400, stop=tuple("abcdefghijklmnop")))
    assert stopped.finish_reason == "stop"
    check_cover(stopped)
    text = tokenizer.decode(stopped.ids.tolist(), skip_special_tokens=False)
    assert text[-1] in "abcdefghijklmnop" or int(stopped.ids[-1]) == end
    assert not set(text[:-1].removesuffix("<|im_end|")) & set("abcdefghijklmnop")


def test_a_context_that_does_not_fit_is_refused(engine: Engine) -> None:
    with pytest.raises(ValueError, match="do not fit into 512"):
        engine.generate(np.arange(200, dtype=np.int32), LONG)


def test_a_cancelled_request_is_given_up(engine: Engine) -> None:
    async def body() -> None:
        async with asyncio.TaskGroup() as tasks:
            request = tasks.create_task(engine.generator.generate(PROMPT, LONG))
            await asyncio.sleep(0)
            request.cancel()

    engine.run(body())
    assert engine.generator.stats().running == 0
    check_cover(engine.generate())


@pytest.mark.parametrize("broken", ["missing", "empty", "corrupt"])
def test_weights_that_do_not_load_change_nothing(engine: Engine, broken: str, tmp_path: Path) -> None:
    path = tmp_path / "weights"
    if broken != "missing":
        path.mkdir()
    if broken == "corrupt":
        (path / "model.safetensors").write_bytes(b"\xff" * 4096)
    version, updates = engine.generator.version, engine.generator.stats().updates
    with pytest.raises(UpdateFailed, match="did not load"):
        engine.run(engine.generator.update_weights(path, version + 1))
    assert engine.generator.version == version
    assert engine.generator.stats().updates == updates
    drawn = engine.generate()
    check_cover(drawn)
    assert [span.version for span in drawn.spans] == [version]


def test_an_update_under_running_requests_shows_in_their_spans(
    engine: Engine, model: Path, carried: Carried
) -> None:
    """Each part of a turn has the log-probabilities of the very weights that its span names."""
    old = engine.generator.version + 1
    new = old + 1
    engine.run(engine.generator.update_weights(weights(model, carried.directory / "before", 1.0), old))
    doubled = carried.path(2.0, new)

    async def body() -> list[Generation]:
        generator = engine.generator
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(generator.generate(PROMPT, Sampling(max_tokens=8)))
            rest = [tasks.create_task(generator.generate(PROMPT, LONG)) for _ in range(12)]
            await first  # by now the others are some tokens into their turns
            await generator.update_weights(doubled, new)
        return [request.result() for request in rest]

    drawn = engine.run(body())
    assert engine.generator.version == new
    for generation in drawn:
        check_cover(generation)
    mixed = [generation for generation in drawn if len(generation.spans) == 2]
    assert mixed, "no request was under way when the weights changed"
    for generation in mixed:
        assert [span.version for span in generation.spans] == [old, new]
    half = mixed[0].spans[0].end
    assert half > 0
    exact = reference(model, PROMPT, mixed[0].ids)[:half]
    np.testing.assert_allclose(mixed[0].logprobs[:half], exact, atol=2e-3)
    assert engine.generator.stats().paused_seconds > 0


def test_keys_and_values_of_old_weights_serve_no_new_request(engine: Engine, carried: Carried) -> None:
    """After an update the same prompt has the log-probabilities of the new weights, from the first token."""
    engine.generate()  # the prompt now lies in the prefix cache
    version = engine.generator.version + 1
    engine.run(engine.generator.update_weights(carried.path(0.5, version), version))
    halved = carried.directory / "times-0.5"
    drawn = engine.generate()
    assert [span.version for span in drawn.spans] == [engine.generator.version]
    np.testing.assert_allclose(drawn.logprobs, reference(halved, PROMPT, drawn.ids), atol=2e-3)


def test_prepared_weights_are_not_drawn_with_before_they_are_live(
    engine: Engine, model: Path, tmp_path: Path
) -> None:
    greedy = Sampling(max_tokens=20, temperature=0.0)
    with open_segment_file(tmp_path) as segment:
        version = engine.generator.version + 1
        carried = Carried(model, segment, tmp_path)
        engine.run(engine.generator.update_weights(carried.path(1.0, version), version))
        before = [engine.generate(sampling=greedy) for _ in range(2)][-1]  # out of the prefix cache
        tripled = carried.path(3.0, version + 1)
        engine.run(engine.generator.prepare(tripled, version + 1))
        after = engine.generate(sampling=greedy)
        assert [span.version for span in after.spans] == [version]
        np.testing.assert_array_equal(after.ids, before.ids)
        np.testing.assert_array_equal(after.logprobs, before.logprobs)
        engine.run(engine.generator.update_weights(tripled, version + 1))
    drawn = engine.generate()
    exact = reference(tmp_path / "times-3", PROMPT, drawn.ids)
    np.testing.assert_allclose(drawn.logprobs, exact, atol=2e-3)


def test_versions_only_rise(engine: Engine, model: Path) -> None:
    with pytest.raises(UpdateFailed, match="are not newer"):
        engine.run(engine.generator.update_weights(model, engine.generator.version))


def test_the_calls_of_a_killed_engine_end_and_a_new_one_draws_them_from_the_current_weights(
    engine: Engine, settings: VllmSettings, model: Path, tmp_path: Path
) -> None:
    """From here on the shared engine is another one, in bfloat16; given float32, it has converted it."""
    killed, version = engine.generator, engine.generator.version + 1

    async def attempt() -> Exception | None:
        try:
            await killed.generate(PROMPT, LONG)
        except GeneratorDead as death:
            return death
        return None

    async def body(segment: Path) -> tuple[list[Exception | None], list[Generation]]:
        await engine.replicas.update_weights(segment, version)
        async with asyncio.TaskGroup() as tasks:
            waiting = [tasks.create_task(attempt()) for _ in range(4)]
            drawing = [tasks.create_task(engine.replicas.generate(PROMPT, LONG)) for _ in range(4)]
            await asyncio.sleep(0)
            pids = engine_pids(settings.log_path)
            assert pids
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        return [call.result() for call in waiting], [call.result() for call in drawing]

    with open_segment_file(tmp_path) as segment:
        Carried(model, segment, tmp_path).path(2.0, version)
        deaths, drawn = engine.run(body(segment))
    assert all(isinstance(death, GeneratorDead) for death in deaths)
    assert str(settings.log_path) in str(deaths[0])
    with pytest.raises(GeneratorDead):
        engine.run(killed.generate(PROMPT, LONG))
    with pytest.raises(GeneratorDead):
        engine.run(killed.update_weights(model, version + 1))
    assert engine.generator is not killed
    assert [generation.spans[0].version for generation in drawn] == [version] * 4
    for generation in drawn:
        check_lower(generation, right=tmp_path / "times-2", wrong=model)


def check_lower(generation: Generation, right: Path, wrong: Path) -> None:
    """In bfloat16: these weights drew it, and not those."""
    check_cover(generation)
    exact = reference(right, PROMPT, generation.ids)
    np.testing.assert_allclose(generation.logprobs, exact, atol=0.1)
    assert np.abs(generation.logprobs - reference(wrong, PROMPT, generation.ids)).max() > 0.3


def test_bfloat16_weights_go_live_everywhere(engine: Engine, model: Path, tmp_path: Path) -> None:
    """Also in the packed copies that the engine keeps: else new hidden states would meet old matrices."""
    generator, doubled = engine.generator, weights(model, tmp_path / "doubled", 2.0)
    with open_segment_file(tmp_path) as segment:
        version = generator.version + 1
        Carried(model, segment, tmp_path).path(1.0, version, torch.bfloat16)
        engine.run(generator.update_weights(segment, version))
    check_lower(engine.generate(), right=model, wrong=doubled)
    engine.run(generator.update_weights(doubled, version + 1))
    check_lower(engine.generate(), right=doubled, wrong=model)


def engine_pids(log: Path) -> list[int]:
    status = log.stat()
    return reaper.writers(status.st_dev, status.st_ino)


PROGRAM = """
import asyncio, pathlib, sys
from rl.generators.vllm import VllmSettings, open_vllm

async def main(model, log, then):
    settings = VllmSettings(pathlib.Path(model), pathlib.Path(log), max_context=512, kv_cache_bytes=64 << 20)
    if then == "starting":
        print("starting", flush=True)
    async with open_vllm(settings) as generator:
        print("ready", flush=True)
        if then == "wait":
            await asyncio.Event().wait()

if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture
def temporary() -> Iterator[Path]:
    """The program's directory for temporary files: near the root, for the engine keeps sockets there."""
    with tempfile.TemporaryDirectory(prefix="t-") as directory:
        yield Path(directory)


def program(settings: VllmSettings, directory: Path, temporary: Path, then: str) -> subprocess.Popen[str]:
    """A program that holds an engine, in a process of its own."""
    (directory / "program.py").write_text(PROGRAM)
    return subprocess.Popen(
        [sys.executable, str(directory / "program.py"), str(settings.model), str(directory / "log"), then],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path.cwd()), "TMPDIR": str(temporary)},
    )


def scratch_directories(temporary: Path) -> list[Path]:
    return list(temporary.glob(f"{SCRATCH_PREFIX}*"))


def handles_of(pids: list[int]) -> list[int]:
    """Of those that have not ended yet."""
    handles = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            handles.append(os.pidfd_open(pid))
    return handles


def wait_for_end(handles: list[int]) -> None:
    for handle in handles:
        ended, _, _ = select.select([handle], [], [], END_SECONDS)
        os.close(handle)
        assert ended, "a process of the engine is still there"


def test_the_engine_dies_with_a_killed_parent(
    settings: VllmSettings, tmp_path: Path, temporary: Path
) -> None:
    with program(settings, tmp_path, temporary, "wait") as parent:
        assert parent.stdout is not None
        assert parent.stderr is not None
        assert parent.stdout.readline() == "ready\n", parent.stderr.read()
        assert scratch_directories(temporary)
        # The processes of the engine, and the one that ends them.
        handles = handles_of(descendants(parent.pid))
        assert handles
        parent.kill()
    wait_for_end(handles)
    assert engine_pids(tmp_path / "log") == []
    assert scratch_directories(temporary) == []


def test_a_program_that_held_an_engine_ends_without_a_word(
    settings: VllmSettings, tmp_path: Path, temporary: Path
) -> None:
    with program(settings, tmp_path, temporary, "end") as parent:
        output, errors = parent.communicate()
    assert (output, errors, parent.returncode) == ("ready\n", "", 0)
    # Python's resource tracker ends shortly after the program, not before it.
    wait_for_end(handles_of(engine_pids(tmp_path / "log")))
    assert scratch_directories(temporary) == []
