"""Where the daemon meets its page: nothing of an HTTP server is imported where the settings want none."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from sandboxd.config import Config
from sandboxd.pools import Pools


@contextlib.asynccontextmanager
async def page(config: Config, pools: Pools) -> AsyncIterator[str | None]:
    """The live page for as long as the block runs, where the settings want one; yields its address. Enter it
    before the pools are added. Raises ConfigError.
    """
    if config.web is None:
        yield None
        return
    from sandboxd.web.server import served

    async with served(config, pools) as where:
        yield where
