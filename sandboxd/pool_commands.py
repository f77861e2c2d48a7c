"""The parts of the `sandboxd` command that concern whole pools; each returns the exit code."""

from __future__ import annotations

import argparse
import dataclasses
import time

from sandboxd.client import Client
from sandboxd.config import ConfigError
from sandboxd.output import say


async def reload(arguments: argparse.Namespace) -> int:
    """`sandboxd reload`."""
    async with Client(arguments.address) as client:
        done = await client.reload_config()
    say(str(done), dataclasses.asdict(done), as_json=arguments.json)
    return 0


async def prewarm(arguments: argparse.Namespace) -> int:
    """`sandboxd prewarm`: announces, and says what the pool will do."""
    for option in ("by", "grace"):
        if not getattr(arguments, option) >= 0:
            raise ConfigError(f"prewarm --{option} {getattr(arguments, option):g}: must not be negative")
    if not arguments.count and not arguments.id:
        raise ConfigError("prewarm 0: withdraws an announcement; name it with --id ID")
    async with Client(arguments.address) as client:
        plan = await client.prewarm(
            arguments.pool,
            arguments.count,
            by=arguments.by,
            grace=arguments.grace,
            announcement_id=arguments.id,
        )
    now = time.time()
    told = {"pool": arguments.pool, **dataclasses.asdict(plan)}
    if not arguments.count:
        say(f"{arguments.pool}: {arguments.id} is withdrawn", told, as_json=arguments.json)
        return 0
    ready = "ready when they are" if plan.ready is None else f"ready in {max(0.0, plan.ready - now):.1f} s"
    few = f" of {arguments.count}, for more do not fit" if plan.count < arguments.count else ""
    words = (
        f"{arguments.pool}: {plan.count}{few}; starts begin in {max(0.0, plan.begins - now):.1f} s,"
        f" {ready}, kept until {plan.expires - now:.0f} s from now"
    )
    say(words, told, as_json=arguments.json)
    return 0
