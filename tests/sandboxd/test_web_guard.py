"""Who may ask the page for what: the host's names, other sites, tokens, and bodies that are no good."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from sandboxd.client import Client
from sandboxd.config import Config, ConfigError, load
from sandboxd.daemon import running
from sandboxd.web.guard import is_own_name

from .page_kit import free_port

pytestmark = pytest.mark.anyio
TOKEN = "0123456789abcdef"
WARM = "/pools/python/warm"
BEARER = {"Authorization": f"Bearer {TOKEN}"}


def settings(tmp_path: Path, *, token: bool = True, **more: Any) -> Config:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    return load(
        None,
        state_dir=tmp_path / "state",
        web=f"127.0.0.1:{free_port()}",
        web_token_file=file if token else None,
        drain_seconds=0.2,
        **{"pools": {"python": {"backend": "fake", "warm": 2}}, **more},
    )


@contextlib.asynccontextmanager
async def page(config: Config) -> AsyncIterator[tuple[aiohttp.ClientSession, Client]]:
    async with running(config) as addresses, Client(addresses[0]) as client:
        async with aiohttp.ClientSession(f"http://{config.web}") as session:
            yield session, client


async def told(session: aiohttp.ClientSession, method: str, path: str, **options: Any) -> tuple[int, str]:
    async with session.request(method, path, **options) as reply:
        assert reply.headers["X-Content-Type-Options"] == "nosniff"
        assert "default-src 'none'" in reply.headers["Content-Security-Policy"]
        assert "Access-Control-Allow-Origin" not in reply.headers
        return reply.status, (await reply.text()).strip()


@pytest.mark.parametrize(
    ("host", "own"),
    [
        ("127.0.0.1:8080", True),
        ("[::1]:8080", True),
        ("[::1]", True),
        ("localhost", True),
        ("LocalHost:1", True),
        ("box.example:80", True),
        ("box.example.", True),
        ("evil.example:8080", False),
        ("127.0.0.1.evil.example", False),
        ("localhost.evil.example:80", False),
        ("", False),
        (None, False),
        (":8080", False),
    ],
)
def test_names_of_the_host(host: str | None, own: bool) -> None:
    assert is_own_name(host, ["Box.Example"]) is own


async def test_what_other_sites_may_do(tmp_path: Path) -> None:
    async with page(settings(tmp_path)) as (session, _):
        for path in ("/", "/events", "/nothing"):
            status, words = await told(session, "GET", path, headers={"Host": "evil.example"})
            assert (status, words) == (421, "'evil.example' is no name of this daemon: add it to web_names")
        for site in ("cross-site", "same-site"):
            status, _ = await told(session, "GET", "/events", headers={"Sec-Fetch-Site": site})
            assert status == 403
        assert (await told(session, "OPTIONS", WARM, headers={"Origin": "http://x"}))[0] == 401
        assert (await told(session, "GET", "/../page.py"))[0] == 404
        assert (await told(session, "DELETE", "/", headers=BEARER))[0] == 405


async def test_without_a_token_it_only_shows(tmp_path: Path) -> None:
    async with page(settings(tmp_path, token=False)) as (session, client):
        for headers in ({}, BEARER, {"Authorization": "Bearer "}):
            status, words = await told(session, "POST", WARM, json={"warm": 0}, headers=headers)
            assert (status, words.partition(":")[0]) == (403, "this page is read-only")
        assert (await client.get_pool("python")).warm_target == 2


@pytest.mark.parametrize(
    "given", ["", "Bearer", "Bearer ", "Bearer 0123456789abcdeg", f"Basic {TOKEN}", TOKEN, "Bearer ä"]
)
async def test_a_wrong_token(tmp_path: Path, given: str) -> None:
    async with page(settings(tmp_path)) as (session, _):
        headers = {"Authorization": given}
        assert (await told(session, "POST", WARM, json={"warm": 0}, headers=headers))[0] == 401


async def test_with_the_token_leases_end_and_pools_change(tmp_path: Path) -> None:
    async with page(settings(tmp_path)) as (session, client):
        box = await client.acquire("python", timeout=20)
        name = box.name.removeprefix("sandboxes/")
        release = f"/sandboxes/{name}/release"
        status, words = await told(session, "POST", release, json={}, headers=BEARER)
        assert (status, json.loads(words)) == (200, {"released": name})
        assert (await told(session, "POST", release, json={}, headers=BEARER))[0] == 404
        assert (await told(session, "POST", WARM, json={"warm": 5}, headers=BEARER))[0] == 200
        async with asyncio.timeout(20):
            while (await client.get_pool("python")).warm < 5:
                await asyncio.sleep(0.02)
        bodies: tuple[object, ...] = (
            {"warm": -1},
            {"warm": True},
            {"warm": "3"},
            {"warm": 10**9},
            {},
            [],
            1.5,
        )
        for body in bodies:
            status, words = await told(session, "POST", WARM, json=body, headers=BEARER)
            assert (status, "must be a whole number from 0 to 1000000" in words) == (400, True)
        bad = await told(session, "POST", WARM, data=b"{", headers=BEARER)
        assert bad == (400, 'the body must be JSON, as in {"warm": 8}')
        large = await told(session, "POST", WARM, data=b" " * 5000, headers=BEARER)
        assert large[0] == 413
        unknown = await told(session, "POST", "/pools/none/warm", json={"warm": 1}, headers=BEARER)
        assert unknown == (404, "no pool 'none'; this daemon has: python")


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/sandboxes/none", 404),
        ("/sandboxes/python-0", 404),
        ("/sandboxes/%00", 400),
        ("/sandboxes/a%2Fb", 400),
    ],
)
async def test_names_that_lead_nowhere(tmp_path: Path, path: str, status: int) -> None:
    async with page(settings(tmp_path)) as (session, _):
        answer = await told(session, "GET", path)
        assert answer[0] in (404, status)
        assert answer[1].count("\n") == 0


def test_settings_that_cannot_be(tmp_path: Path) -> None:
    for value in ("8080", ":80", "127.0.0.1:", "127.0.0.1:http"):
        with pytest.raises(ConfigError, match="must be HOST:PORT"):
            load(None, web=value)
    short = tmp_path / "token"
    short.write_text("secret\n")
    with pytest.raises(ConfigError, match="holds 6 characters: write at least 16"):
        load(None, web_token_file=short).web_token()
    with pytest.raises(ConfigError, match="cannot be read: No such file or directory"):
        load(None, web_token_file=tmp_path / "none").web_token()


async def test_an_address_that_is_taken(tmp_path: Path) -> None:
    config = settings(tmp_path)
    host, _, port = str(config.web).rpartition(":")
    with socket.create_server((host, int(port))):
        with pytest.raises(ConfigError, match=r"web = '127.0.0.1:\d+': .*in use.*; name another with --web"):
            async with running(config):
                pass
