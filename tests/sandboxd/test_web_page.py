"""The page in a real browser: it lives, goes on over a restart, and serves eyes, keys and screen readers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from importlib import resources
from pathlib import Path

import pytest

from sandboxd import Client, errors
from sandboxd.bench.mortal import Mortal

from .browser_kit import Tab, browser_process, tab
from .page_kit import free_port

pytestmark = pytest.mark.anyio
SETTINGS = """
web = "127.0.0.1:{port}"
web_token_file = "{folder}/token"
web_runs = ["{folder}/run"]
[pools.python]
backend = "fake"
warm = 3
size_limit = 16
[pools.broken]
backend = "fake"
warm = 0
setup = ["sh", "-c", "echo the reason >&2; exit 9"]
"""
RELEASE = "document.querySelector('#leases-rows button.small')"
TOKEN = "0123456789abcdef"
# Of each text the contrast with what is behind it; the least of all.
CONTRAST = """(() => {
  const parts = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = (color) => parts(color).slice(0, 3).map((each) => each / 255)
    .map((each) => each <= 0.03928 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4)
    .reduce((sum, each, place) => sum + each * [0.2126, 0.7152, 0.0722][place], 0);
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const color = getComputedStyle(node).backgroundColor, alpha = parts(color)[3];
      if (alpha === undefined || alpha > 0) return color;
    }
  };
  const ratios = [...document.querySelectorAll("body *")]
    .filter((node) => [...node.childNodes].some((each) => each.nodeType === 3 && each.data.trim()))
    .filter((node) => node.getClientRects().length && !node.closest("svg, .unseen, noscript"))
    .map((node) => {
      const [one, two] = [light(getComputedStyle(node).color), light(ground(node))];
      return [(Math.max(one, two) + 0.05) / (Math.min(one, two) + 0.05), node.outerHTML.slice(0, 90)];
    });
  return ratios.sort((a, b) => a[0] - b[0])[0];
})()"""

# Of each failure: when its message had come and when its row was there, in milliseconds of the page's clock,
# and how long after it had happened.
WATCH_FAILURES = """(() => {
  window.seen = [];
  const whole = take, rows_of = document.querySelector("#failures-rows");
  let heard = 0;
  take = (message) => {
    if (message.failures && message.failures.set) heard = performance.now();
    whole(message);
  };
  new MutationObserver((changes) => changes.forEach((change) => change.addedNodes.forEach((line) => {
    if (line.dataset && line.dataset.key)
      window.seen.push([heard, performance.now(), Date.now() - rows.failures[line.dataset.key].when * 1000]);
  }))).observe(rows_of, { childList: true });
})()"""

# What the rules of axe, Deque's checker, find wrong: the rule and where.
AXE = """axe.run(document, { resultTypes: ["violations"] }).then((found) =>
  found.violations.map((each) => [each.id, each.nodes.map((node) => node.html.slice(0, 90))]))"""


def axe_core() -> str:
    """The checker's script."""
    return resources.files("axe_core_python").joinpath("axe.min.js").read_text()


@pytest.fixture(scope="module")
def devtools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with browser_process(tmp_path_factory.mktemp("browser")) as address:
        yield address


@contextlib.asynccontextmanager
async def page(tmp_path: Path, devtools: str) -> AsyncIterator[tuple[Tab, Mortal, Client]]:
    port, config = free_port(), tmp_path / "sandboxd.toml"
    config.write_text(SETTINGS.format(port=port, folder=tmp_path))
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "run").mkdir()
    daemon = Mortal(tmp_path / "state", config)
    try:
        async with asyncio.timeout(60), Client(await daemon.start()) as client:
            async with tab(devtools, f"http://127.0.0.1:{port}/") as opened:
                await opened.until("document.querySelector('#cards article') && link === 'live'")
                yield opened, daemon, client
            # Nothing from elsewhere, and nothing that the browser complained of.
            assert {url for url in opened.asked if not url.startswith(f"http://127.0.0.1:{port}/")} == set()
    finally:
        await daemon.stop()


async def failed(client: Client) -> None:
    with pytest.raises(errors.StartFailed):
        await client.acquire("broken", timeout=30)


async def test_it_lives_through_a_burst_a_failure_and_a_restart(tmp_path: Path, devtools: str) -> None:
    async with page(tmp_path, devtools) as (shown, daemon, client):
        assert await shown.value("document.querySelector('#failures-box').hidden") is True
        boxes = [await client.acquire("python", timeout=30, labels={"episode": f"e{n}"}) for n in range(12)]
        await shown.until("document.querySelectorAll('#leases-rows tr').length === 12")
        assert "episode=e7" in await shown.value("document.querySelector('#leases-rows').innerText")
        await shown.until("document.querySelector('#cards article:last-child .active dd').innerText === '12'")
        await failed(client)
        await shown.until("document.querySelector('#failures-rows details')")
        said = await shown.value("document.querySelector('#failures-rows').textContent")
        assert "setup" in said
        assert "the reason" in said
        # What a screen reader says unasked.
        assert "failed in phase setup" in await shown.until("document.querySelector('#news').textContent")
        assert shown.errors == []
        before = await shown.until("points.python && points.python[0][0]")
        await daemon.kill()
        await shown.until("document.querySelector('#link').classList.contains('bad')")
        await daemon.start()
        await shown.until("link === 'live'")
        # The fake's sandboxes died with it; the curve goes on.
        await shown.until("document.querySelectorAll('#leases-rows tr').length === 0")
        assert await shown.value("points.python[0][0]") == before
        del boxes


async def test_a_failure_is_seen_soon_after_it_happened(tmp_path: Path, devtools: str) -> None:
    """By the page's clock, within 2 s. The other bounds hold on a machine that stands still for a moment."""
    async with page(tmp_path, devtools) as (shown, _, client):
        await shown.value(WATCH_FAILURES)
        for count in range(1, 4):
            await failed(client)
            await shown.until(f"seen.length >= {count}")
        seen = await shown.value("seen")
        for heard, drawn, since in seen:
            assert 0 <= drawn - heard < 5_000
            assert since < 10_000
        assert min(since for _, _, since in seen) < 2_000
        assert shown.errors == []


async def test_by_keyboard_and_for_whoever_has_the_token(tmp_path: Path, devtools: str) -> None:
    async with page(tmp_path, devtools) as (shown, _, client):
        box = await client.acquire("python", timeout=30)
        name = box.name.removeprefix("sandboxes/")
        await box.exec(["sh", "-c", "echo from inside"])
        await shown.until("document.querySelector('#leases-rows button.name')")
        assert await shown.value(f"{RELEASE}.checkVisibility()") is False
        await shown.value("document.querySelector('#leases-rows button.name').focus()")
        await shown.key("Enter")
        await shown.until("document.querySelector('#closeup pre').innerText.includes('from inside')")
        assert await shown.value("document.querySelector('#closeup-title').innerText") == name
        assert await shown.value("document.querySelector('#closeup').contains(document.activeElement)")
        await shown.key("Escape")
        await shown.until("!document.querySelector('#closeup').open")
        assert await shown.value("document.activeElement.innerText") == name
        await shown.value(
            f"document.querySelector('#unlock-form input').value = '{TOKEN}';"
            " document.querySelector('#unlock-form').requestSubmit(); window.confirm = () => true"
        )
        await shown.until(f"{RELEASE}.checkVisibility()")
        await shown.value(f"{RELEASE}.focus()")
        await shown.key("Enter")
        await shown.until("document.querySelectorAll('#leases-rows tr').length === 0")
        with pytest.raises(errors.SandboxNotFound):
            await box.exec(["true"])
        assert shown.errors == []


async def test_any_width_either_scheme_and_by_ear(tmp_path: Path, devtools: str) -> None:
    async with page(tmp_path, devtools) as (shown, _, client):
        row = {"step": 1, "solve_rate/sums": 0.5, "perf/wait_time_ratio": 0.25, "buffer/ready": 3}
        (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        async with client.acquire("python", timeout=30, labels={"episode": "e" * 200}):
            await failed(client)
            await shown.until("document.querySelector('#run-cards').innerText.includes('sums')")
            # One step is no line yet, and is seen all the same.
            assert await shown.value("document.querySelector('#run-cards path.l0').getTotalLength()") > 0
            await shown.value(f"{axe_core()}; 1")
            await shown.until(
                "document.querySelector('#leases-rows tr') && document.querySelector('#failures-rows tr')"
            )
            for scheme in ("light", "dark"):
                for width in (360, 1280):
                    await shown.look_like(width, 800, scheme)
                    assert await shown.value("document.documentElement.scrollWidth") <= width
                    ratio, where = await shown.value(CONTRAST)
                    assert ratio >= 4.5, (scheme, width, where)
                    assert await shown.value(AXE) == []
            await shown.look_like(360, 800, "light")
            tree = (await shown.ask("Accessibility.getFullAXTree"))["nodes"]
            told = {
                (node["role"]["value"], node.get("name", {}).get("value", ""))
                for node in tree
                if "role" in node
            }
            roles = [role for role, _ in told]
            assert {"table", "row", "rowheader", "columnheader", "log", "status", "main"} <= set(roles)
            assert any(role == "image" and "active now 1" in name for role, name in told), told
            unnamed = {
                role for role, name in told if role in ("button", "link", "textbox", "image") and not name
            }
            assert unnamed == set()
        assert shown.errors == []
