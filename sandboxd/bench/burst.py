"""N callers ask at once for a sandbox each, cold or warm; one counts once its first command succeeded, or
once it has its sandbox where none runs a command.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sandboxd.bench import idle, load, plan
from sandboxd.bench.health import asked_meanwhile
from sandboxd.bench.result import Result
from sandboxd.bench.session import PoolOptions, Session, Target, session


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure. `warm`: the pool holds all `count` before the callers ask. The sandboxes are held for
    `hold_seconds` before each is looked at again; the callers are spread over `clients` processes. `execute`
    False: nothing but leases, no command runs, and the pool has no room for sandboxes in place of the leased.
    """

    count: int
    target: Target = field(default_factory=Target)
    start_limit: int | None = None
    hold_seconds: float = 0.0
    warm: bool = False
    clients: int = 1
    execute: bool = True


async def run(options: Options) -> Result:
    """Measures, then looks for what is left behind.

    Raises BackendUnavailable when the daemon cannot be started or reached.
    """
    result = Result("burst", options.target.name, options.count, alive=0 if options.execute else None)
    result.more = {"warm": options.warm, "hold_s": options.hold_seconds, "no_exec": not options.execute}
    pool = PoolOptions(
        options.count,
        warm=options.count if options.warm else 0,
        start_limit=options.start_limit,
        size_limit=None if options.execute else options.count,
    )
    async with session(options.target, pool, result) as opened:
        await _measure(opened, options, result)
    return result


async def _measure(opened: Session, options: Options, result: Result) -> None:
    visits = plan.Plan(
        opened.client.address,
        opened.pool,
        opened.label,
        due=plan.burst(options.count),
        hold=None,
        execute=options.execute,
    )
    asked = asked_meanwhile(opened.client.address, result)
    rest = load.Rest(options.hold_seconds, idle.looked_at(opened, options.hold_seconds, result))
    done, readings = await load.put(opened, visits, options.clients, rest, asked)
    load.note(done, readings, result)
    if not options.execute:
        del result.samples["exec"]
