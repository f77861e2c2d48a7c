"""The starter's orders, worked out once for all sandboxes that differ by their name alone.

Most starts of a pool do, and to list and encode some sixty steps anew took half of the launcher's time.
"""

from __future__ import annotations

import os

from sandboxd.backends.confine import Confinement, Order
from sandboxd.backends.starter import start_order

# Kinds of sandbox that are remembered; with one more all are forgotten.
KINDS = 64
# Stand for the name and the place while an order is worked out, as often as these have bytes.
NAME, PLACE = "\1", "\2"

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Kind = tuple[object, ...]
    # Put together with the place between these, and the name between the parts of each.
    Parts = list[list[bytes]]


class Recipes:
    """Of one launcher."""

    def __init__(self, confinement: Confinement) -> None:
        self._confinement = confinement
        self._known: dict[Kind, Parts] = {}

    def order(self, message: dict[str, Any], vacant: str = "", *, alike: bool = False) -> bytes:
        """What the starter is told to make of a request, in a vacant place where one is named, which with
        `alike` had the same limits. Raises OSError for what cannot be told."""
        name, place = os.fsencode(message["id"]), vacant.encode()
        kind = (len(place), alike, *_kind(message, len(name)))
        parts = self._known.get(kind)
        if parts is not None and b"\0" not in name:
            return _joined(parts, name, place)
        order = self._written(message, vacant, alike)
        parts = self._parts(message, (len(name), len(place)), alike)
        # Not where something else looks like a stand-in.
        if _joined(parts, name, place) == order:
            if len(self._known) >= KINDS:
                self._known.clear()
            self._known[kind] = parts
        return order

    def _parts(self, message: dict[str, Any], sizes: tuple[int, int], alike: bool) -> Parts:
        name, place = sizes
        order = self._written({**message, "id": NAME * name}, PLACE * place, alike)
        apart = order.split(PLACE.encode() * place) if place else [order]
        return [part.split(NAME.encode() * name) for part in apart]

    def _written(self, message: dict[str, Any], vacant: str, alike: bool) -> bytes:
        order = Order(message, vacant, alike=alike)
        return start_order(self._confinement.prepare(order), self._confinement.become(order))


def _joined(parts: Parts, name: bytes, place: bytes) -> bytes:
    return place.join([name.join(part) for part in parts])


def _kind(message: dict[str, Any], size: int) -> Kind:
    """All that an order is made of, but the name."""
    lists = (tuple(message["limits"].items()), tuple(message["layers"]), tuple(message["branches"]))
    switches = (message["host_network"], message["host_system"], message.get("users", False))
    return size, message["cwd"], *switches, *lists
