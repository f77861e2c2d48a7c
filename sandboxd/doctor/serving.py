"""Keeps the pools of a daemon within what its host carries, and says so in the log."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from sandboxd.config import Config
from sandboxd.doctor import needs
from sandboxd.doctor.capacity import Capacity, Share, limits
from sandboxd.doctor.demands import demands
from sandboxd.doctor.facts import Facts
from sandboxd.pool import PoolOptions
from sandboxd.slots import Slots

logger = logging.getLogger(__name__)


class Carried:
    """What the pools of `config` may have on the host of `facts`; each that gets less is told of once."""

    def __init__(self, config: Config, facts: Facts) -> None:
        self.config = config
        self._capacity = Capacity(limits(facts), demands(config))
        for name, share in self._capacity.shares.items():
            self._tell(name, config.pools[name].size_limit, share)

    def options(self, name: str, slots: Slots) -> PoolOptions:
        """The pool's options, with a ceiling that the host carries, now and at each change of it; `slots` are
        those of its backend.
        """
        options = self.config.pools[name].options(self.config.weights(), slots)
        size = self._capacity.shares[name].count
        warm = min(options.bounds.warm_target, size)
        bounds = replace(options.bounds, size_limit=size, warm_target=warm)
        return replace(options, bounds=bounds, carried=lambda wanted: self._resize(name, wanted))

    def _resize(self, name: str, wanted: int) -> int:
        share = self._capacity.resize(name, wanted)
        self._tell(name, wanted, share)
        return share.count

    def _tell(self, name: str, wanted: int, share: Share) -> None:
        if share.limit is not None:
            logger.warning(
                "pool %s: size_limit %d is cut to %d: %s is %s, each sandbox takes %s; run `sandboxd doctor`",
                name,
                wanted,
                share.count,
                share.limit.title,
                share.limit.value,
                share.limit.need[self._capacity.kinds[name]],
            )


def without(facts: Facts, there: Mapping[str, int]) -> Facts:
    """The host as it would be without what a killed daemon left on it: so many sandboxes of each backend.

    They are this daemon's, or destroyed soon, and no load beside it. Each is taken to use all that it may
    need: what it uses less leaves a little more room than there is, which `needs` keeps back.
    """

    def less(value: int | None, need: needs.Need) -> int | None:
        own = sum(count * need[backend] for backend, count in there.items())
        return None if value is None else max(0, value - own)

    groups = facts.groups
    return replace(
        facts,
        tasks=less(facts.tasks, needs.TASKS),
        own_tasks=less(facts.own_tasks, needs.OWN_TASKS),
        files=less(facts.files, needs.HOST_FILES),
        mounts=less(facts.mounts, needs.HOST_MOUNTS),
        groups=replace(groups, pids_now=less(groups.pids_now, needs.OWN_TASKS) or 0),
    )
