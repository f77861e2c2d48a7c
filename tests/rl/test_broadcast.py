"""Weights to several servers at once: vLLM's calls, their contents as vLLM reads them, faults at each,
and tensors that really travel from one process to others.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLWeightTransferInitInfo,
    NCCLWeightTransferUpdateInfo,
)

from rl.errors import ConfigError
from rl.generator import Generator, Sampling, UpdateFailed
from rl.generators.broadcast import BUFFER_BYTES, Broadcast, Sender, open_broadcast
from rl.generators.calls import ServerSettings
from rl.generators.fake import ByteTokenizer, FakeGenerator, sums_reply
from rl.generators.fake_network import FakeNetwork, FakeReceiver, FakeSender
from rl.generators.fake_server import DROP, ERROR, HANG, FakeServer, Receiver, serving
from rl.generators.opening import own_address
from rl.generators.plugin import register
from rl.generators.server import ServerGenerator, open_server
from rl.replica import State
from rl.replicas import Patience, Replicas, open_replicas
from rl.sender_process import SenderProcess, open_sender
from rl.shared_weights import SharedWeights
from rl.weights import open_segment_file

PROMPT = np.array(ByteTokenizer().encode("What is 1 + 2?"), np.int32)
SAMPLING = Sampling(64)
PATIENCE = Patience(pause_seconds=0.0)
UPDATE = ["pause", "start_weight_update", "update_weights", "finish_weight_update", "resume"]
JOIN, LEAVE = "init_weight_transfer_engine", "shutdown_weight_transfer_engine"
SHORT = 1.5
TENSORS = {"a": torch.arange(6.0).view(2, 3), "b.c": torch.full((3,), 0.5), "d": torch.ones(1)}


@dataclass
class Bench:
    """Fake servers that share a network with a fake sender, and the replicas that stand for them."""

    network: FakeNetwork
    sender: FakeSender
    servers: list[FakeServer]
    replicas: Replicas
    path: Path
    weights: SharedWeights
    versions: list[int] = field(default_factory=list)

    async def publish(self, version: int) -> None:
        self.weights.write(version, TENSORS)
        await self.replicas.update_weights(self.path, version)

    async def all_ready(self) -> None:
        """Waits until every server is served from; the test's time limit bounds it."""
        await until(lambda: self.replicas.states == [State.READY] * len(self.servers))

    def clear(self) -> None:
        for server in self.servers:
            server.calls.clear()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


def announcing(broadcast: Broadcast) -> Callable[[Sequence[Generator], int], None]:
    return lambda generators, version: broadcast.announce(
        [each.calls for each in generators if isinstance(each, ServerGenerator)], version
    )


@asynccontextmanager
async def opened(
    tmp_path: Path,
    sender: Sender,
    servers: Sequence[FakeServer],
    seconds: float,
    address: str = "127.0.0.1",
) -> AsyncIterator[tuple[Replicas, Path, SharedWeights]]:
    """Replicas of these servers, and a segment for their weights."""
    model = {name: tensor.numpy() for name, tensor in TENSORS.items()}
    save_file(model, tmp_path / "model.safetensors")
    async with AsyncExitStack() as stack:
        path = stack.enter_context(open_segment_file(tmp_path))
        urls = [await stack.enter_async_context(serving(server)) for server in servers]
        broadcast = await stack.enter_async_context(open_broadcast(sender, address, seconds))
        opens = [
            partial(
                open_server,
                ServerSettings(url, tmp_path, max_context=200, admin_seconds=seconds),
                channel=broadcast,
            )
            for url in urls
        ]
        replicas = await stack.enter_async_context(
            open_replicas(opens, PATIENCE, announce=announcing(broadcast))
        )
        yield replicas, path, SharedWeights(path, TENSORS, torch.float32)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., None]:
    """Runs a test's body with servers of so many workers each, within 20 s; no failure goes unheard."""
    unheard: list[dict[str, Any]] = []

    def run_body(
        body: Callable[[Bench], Coroutine[Any, Any, None]],
        workers: Sequence[int] = (1, 1),
        seconds: float = 20.0,
        address: str = "127.0.0.1",
    ) -> None:
        async def whole() -> None:
            asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
            network = FakeNetwork()
            sender = FakeSender(network)
            servers = [
                FakeServer(
                    FakeGenerator(ByteTokenizer(), sums_reply(lambda version: 1.0)),
                    FakeReceiver(network, count, parse_init, parse_update),
                    count,
                )
                for count in workers
            ]
            async with (
                asyncio.timeout(20),
                opened(tmp_path, sender, servers, seconds, address) as (replicas, path, weights),
            ):
                await body(Bench(network, sender, servers, replicas, path, weights))

        asyncio.run(whole())
        gc.collect()
        assert unheard == []

    return run_body


def parse_init(info: dict[str, Any]) -> NCCLWeightTransferInitInfo:
    return NCCLWeightTransferInitInfo(**info)


def parse_update(info: dict[str, Any]) -> NCCLWeightTransferUpdateInfo:
    return NCCLWeightTransferUpdateInfo(**info)


def test_one_broadcast_reaches_all_servers_each_with_its_ranks(run: Callable[..., None]) -> None:
    async def body(bench: Bench) -> None:
        await bench.publish(1)
        for server in bench.servers:
            assert server.calls == [LEAVE, JOIN, *UPDATE]
            assert server.bodies["update_weights"]["update_info"] == {
                "names": list(TENSORS),
                "dtype_names": ["float32"] * 3,
                "shapes": [[2, 3], [3], [1]],
            }
            assert server.bodies["finish_weight_update"] == {"weight_version": "1"}
        infos = [server.bodies[JOIN]["init_info"] for server in bench.servers]
        assert {info["rank_offset"] for info in infos} in ({1, 3}, {1, 2})
        assert [(info["world_size"], info["packed"]) for info in infos] == [(4, True)] * 2
        assert infos[0]["packed_buffer_size_bytes"] == BUFFER_BYTES
        bench.clear()
        await bench.publish(2)
        assert [server.calls for server in bench.servers] == [UPDATE, UPDATE]  # the group stands
        assert (bench.sender.sent, bench.network.made) == ([1, 2], [4])
        assert [server.weight_version for server in bench.servers] == ["2", "2"]
        drawn = await bench.replicas.generate(PROMPT, SAMPLING)
        assert {span.version for span in drawn.spans} == {2}

    run(body, workers=(2, 1))


@pytest.mark.parametrize(("call", "fault"), [(JOIN, ERROR), (JOIN, DROP), ("get_world_size", ERROR)])
def test_a_server_that_does_not_join_costs_the_others_another_group(
    run: Callable[..., None], call: str, fault: str
) -> None:
    async def body(bench: Bench) -> None:
        # Each time anew, as from a server that has no NCCL: after three it is given up.
        bench.servers[0].faults[f"/{call}"] += [fault] * 9
        with pytest.raises(UpdateFailed, match="no generator took weights 1: "):
            await bench.publish(1)
        assert not any(server.paused for server in bench.servers)
        await bench.replicas.update_weights(bench.path, 1)
        assert bench.replicas.version == 1
        assert (bench.servers[1].weight_version, bench.servers[0].weight_version) == ("1", "default")
        for _ in range(3):
            await bench.replicas.generate(PROMPT, SAMPLING)
        assert bench.servers[0].generator.stats().finished == 0
        assert bench.replicas.states[0] is not State.READY

    run(body)


def test_a_server_that_hangs_when_it_is_to_join_is_found_out_by_time(run: Callable[..., None]) -> None:
    async def body(bench: Bench) -> None:
        bench.servers[0].faults[f"/{JOIN}"].append(HANG)
        with pytest.raises(UpdateFailed, match="no generator took weights 1"):
            await bench.publish(1)
        await bench.replicas.update_weights(bench.path, 1)
        await bench.all_ready()
        assert [server.weight_version for server in bench.servers] == ["1", "1"]

    run(body, seconds=SHORT)


@pytest.mark.parametrize("fault", [ERROR, DROP])
def test_a_server_that_is_not_paused_leaves_the_others_with_what_they_had(
    run: Callable[..., None], fault: str
) -> None:
    async def body(bench: Bench) -> None:
        await bench.publish(1)
        bench.servers[0].faults["/pause"] += [fault] * (3 if fault == DROP else 1)
        with pytest.raises(UpdateFailed, match="no generator took weights 2"):
            await bench.publish(2)
        assert [server.weight_version for server in bench.servers] == ["1", "1"]
        assert not any(server.paused for server in bench.servers)
        await bench.publish(3)
        assert [server.weight_version for server in bench.servers] == ["3", "3"]
        assert bench.network.made == [3, 3]

    run(body)


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        ("start_weight_update", ERROR),
        ("update_weights", ERROR),
        ("update_weights", HANG),
        ("finish_weight_update", ERROR),
        ("finish_weight_update", DROP),
        ("resume", ERROR),
    ],
)
def test_a_server_that_fails_in_the_middle_leaves_the_group_and_comes_back_with_whole_weights(
    run: Callable[..., None], call: str, fault: str
) -> None:
    async def body(bench: Bench) -> None:
        await bench.publish(1)
        bench.servers[0].faults[f"/{call}"] += [fault] * (2 if call.startswith("start") else 1)
        try:
            await bench.publish(2)
            assert bench.servers[1].weight_version == "2"
        except UpdateFailed:
            # The broadcast broke, so that the other one's weights are unknown, too.
            assert call in ("start_weight_update", "update_weights")
        await bench.all_ready()
        await bench.publish(3)
        assert [server.weight_version for server in bench.servers] == ["3", "3"]
        assert not any(server.paused for server in bench.servers)
        assert len(bench.network.made) > 1
        drawn = await bench.replicas.generate(PROMPT, SAMPLING)
        assert {span.version for span in drawn.spans} == {3}

    run(body, seconds=SHORT if fault == HANG else 20.0)


def test_a_sender_that_fails_harms_no_server(run: Callable[..., None]) -> None:
    async def body(bench: Bench) -> None:
        bench.sender.failing_opens = 1
        with pytest.raises(UpdateFailed, match="the fake sender was told to fail"):
            await bench.publish(1)
        assert not any("pause" in server.calls for server in bench.servers)
        await bench.all_ready()
        await bench.publish(2)
        assert [server.weight_version for server in bench.servers] == ["2", "2"]

    run(body)


def test_an_address_that_is_not_this_hosts_is_named(run: Callable[..., None]) -> None:
    async def body(bench: Bench) -> None:
        with pytest.raises(UpdateFailed, match=r"nobody can meet at 192\.0\.2\.1, generator.address: "):
            await bench.publish(1)
        assert not any("pause" in server.calls for server in bench.servers)

    run(body, address="192.0.2.1")


def test_an_update_that_is_cancelled_resumes_every_server(run: Callable[..., None]) -> None:
    async def body(bench: Bench) -> None:
        bench.servers[0].faults["/update_weights"].append(HANG)
        publishing = asyncio.ensure_future(bench.publish(1))
        await until(lambda: all("update_weights" in server.calls for server in bench.servers))
        publishing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await publishing
        await until(lambda: not any(server.paused for server in bench.servers))

    run(body)


class RealReceiver(Receiver):
    """vLLM's engine `gloo`, which the plug-in registers, in a thread; `taken` is what it loads."""

    def __init__(self) -> None:
        register()
        parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
        settings: Any = SimpleNamespace(parallel_config=parallel, model_config=None)
        self.taken: dict[str, torch.Tensor] = {}
        model: Any = SimpleNamespace(load_weights=self._load)
        self._engine: Any = WeightTransferEngineFactory.create_engine(
            WeightTransferConfig(backend="gloo"), settings, torch.device("cpu"), model
        )

    def _load(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        self.taken |= {name: tensor.clone() for name, tensor in weights}

    async def join(self, init_info: dict[str, Any]) -> bool:
        return await self._in_thread(
            lambda: self._engine.init_transfer_engine(self._engine.parse_init_info(init_info))
        )

    async def receive(self, update_info: dict[str, Any]) -> bool:
        return await self._in_thread(lambda: self._engine.update_weights(update_info))

    async def leave(self) -> bool:
        return await self._in_thread(self._engine.shutdown)

    async def _in_thread(self, work: Callable[[], None]) -> bool:
        try:
            await asyncio.to_thread(work)
        except RuntimeError:
            return False
        return True


def test_tensors_travel_from_the_sender_process_to_every_server(tmp_path: Path) -> None:
    receivers = [RealReceiver(), RealReceiver()]
    servers = [
        FakeServer(FakeGenerator(ByteTokenizer(), sums_reply(lambda version: 1.0)), receiver)
        for receiver in receivers
    ]

    def check(scale: float) -> None:
        for receiver in receivers:
            assert receiver.taken.keys() == TENSORS.keys()
            assert all(torch.equal(receiver.taken[name], TENSORS[name] * scale) for name in TENSORS)

    async def killed(sender: SenderProcess) -> None:
        """From outside, as by a kernel short of memory."""
        assert sender.pid is not None
        process = await asyncio.create_subprocess_exec("kill", "-9", str(sender.pid))
        await process.wait()

    async def whole() -> None:
        async with (
            asyncio.timeout(60),
            open_sender("gloo", tmp_path / "sender.log") as sender,
            opened(tmp_path, sender, servers, 50.0) as (replicas, path, weights),
        ):
            for version in (1, 2):
                weights.write(version, {name: tensor * version for name, tensor in TENSORS.items()})
                await replicas.update_weights(path, version)
                check(version)
            await killed(sender)
            await until(lambda: not sender.joined)
            weights.write(3, {name: tensor * 3 for name, tensor in TENSORS.items()})
            await replicas.update_weights(path, 3)
            check(3)

    asyncio.run(whole())


def test_servers_on_this_host_are_told_its_loopback_and_unknown_ones_are_refused() -> None:
    assert own_address(["http://127.0.0.1:8000", "http://127.0.0.1:8001"]) == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"generator.servers: no way to 'http://\[::1\]:1'"):
        own_address(["http://[::1]:1"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nccl_without_a_gpu_is_refused_in_one_line(tmp_path: Path) -> None:
    async def whole() -> None:
        async with open_sender("nccl", tmp_path / "sender.log"):
            pass

    with pytest.raises(
        ConfigError, match=r"^generator.weights = 'nccl': .* no CUDA device .*; choose 'gloo'"
    ):
        asyncio.run(whole())
