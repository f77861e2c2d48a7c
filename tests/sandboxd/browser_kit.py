"""A real Chromium without a window, driven by its DevTools protocol over a pipe of WebSocket messages."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # root has no other way; only the daemon's own page is opened
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--remote-debugging-port=0",
)


def chromium() -> str:
    """The browser's path; skips the test without one, fails it when CI is set."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is not None:
        return found
    missing = "no Chromium is installed: run `apt-get install chromium`"
    if os.environ.get("CI"):
        pytest.fail(f"CI is set, so the browser's tests may not be skipped: {missing}", pytrace=False)
    pytest.skip(missing)


@contextlib.contextmanager
def browser_process(folder: Path) -> Iterator[str]:
    """The address of its DevTools; it ends with the block."""
    command = [chromium(), *FLAGS, f"--user-data-dir={folder}", "about:blank"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        said = []
        for line in process.stderr:
            said.append(line)
            if line.startswith("DevTools listening on "):
                break
        else:
            raise AssertionError(f"the browser did not start: {''.join(said)}")
        yield line.split()[-1]
    finally:
        process.terminate()
        process.stderr.close()
        process.wait(30)


class Tab:
    """One page of the browser. `errors` are what its console and its network complained of."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, target: str, session: str) -> None:
        self.errors: list[str] = []
        self.asked: list[str] = []
        self.target = target
        self._socket, self._session = socket, session
        self._ids = itertools.count(1000)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._ids)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        message = {"id": number, "method": method, "params": parameters, "sessionId": self._session}
        await self._socket.send_json(message)
        async with asyncio.timeout(30):
            return await answer

    async def listen(self) -> None:
        async for message in self._socket:
            told = json.loads(message.data)
            if "id" in told and (answer := self._answers.pop(told["id"], None)) and not answer.done():
                answer.set_result(told.get("result") or {"error": told.get("error")})
            match told.get("method"):
                case "Runtime.exceptionThrown":
                    self.errors.append(str(told["params"]["exceptionDetails"]))
                case "Log.entryAdded" if told["params"]["entry"]["level"] == "error":
                    self.errors.append(told["params"]["entry"]["text"])
                case "Network.requestWillBeSent":
                    self.asked.append(told["params"]["request"]["url"])

    async def open(self, url: str) -> None:
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            await self.ask(f"{domain}.enable")
        await self.ask("Page.navigate", url=url)

    async def value(self, script: str) -> Any:
        """What an expression gives; awaited where it is a promise."""
        result = await self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, script: str, seconds: float = 20) -> Any:
        """Waits, in the page, until an expression is true; looks again at every frame's worth of time."""
        waiting = (
            "new Promise((done, failed) => { const look = () => { let value = false;"
            f" try {{ value = {script}; }} catch (error) {{}}"
            " if (value) done(value); else setTimeout(look, 20); }; look(); })"
        )
        async with asyncio.timeout(seconds):
            return await self.value(waiting)

    async def key(self, name: str) -> None:
        codes = {"Tab": 9, "Enter": 13, "Escape": 27}
        text = {"text": "\r"} if name == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            await self.ask(
                "Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=codes[name],
                **(text if kind == "keyDown" else {}),
            )  # fmt: skip

    async def look_like(self, width: int, height: int, scheme: str) -> None:
        """The size of the window in pixels, and `light` or `dark`."""
        await self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.ask("Emulation.setEmulatedMedia", features=features)

    async def shot(self, path: Path) -> None:
        taken = await self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(taken["data"]))


@contextlib.asynccontextmanager
async def tab(devtools: str, url: str) -> AsyncIterator[Tab]:
    """A new page at this address, closed with the block."""
    async with aiohttp.ClientSession() as session, session.ws_connect(devtools, max_msg_size=0) as socket:

        async def begin(number: int, method: str, **parameters: Any) -> dict[str, Any]:
            await socket.send_json({"id": number, "method": method, "params": parameters})
            while True:
                told = await socket.receive_json()
                if told.get("id") == number:
                    return dict(told["result"])

        target = (await begin(1, "Target.createTarget", url="about:blank"))["targetId"]
        attached = await begin(2, "Target.attachToTarget", targetId=target, flatten=True)
        page = Tab(socket, target, attached["sessionId"])
        listening = asyncio.create_task(page.listen())
        try:
            await page.open(url)
            yield page
        finally:
            await socket.send_json({"id": 3, "method": "Target.closeTarget", "params": {"targetId": target}})
            listening.cancel()
            await asyncio.wait([listening])
