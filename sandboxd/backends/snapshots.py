"""Branches and images made of namespace sandboxes: what the launcher copies, and what becomes of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from pathlib import Path
from typing import Any

from sandboxd.backends import users
from sandboxd.backends.link import COPY_SECONDS, Link
from sandboxd.errors import BackendUnavailable, InvalidRequest, Phase, SandboxLost, StartFailed
from sandboxd.images.store import LAYER_LIMIT, Image, ImageError, ImageStore, Layer, check_name
from sandboxd.lifetime import cleaned_up, in_thread, whole
from sandboxd.types import Template


class Snapshots:
    """Copies of writable layers, made by the launcher at the other end of `link`."""

    def __init__(self, link: Link, uid_base: int) -> None:
        self._link = link
        self._uid_base = uid_base

    async def branch(self, sandbox_id: str, branch: str) -> None:
        """See `base.Backend.branch`."""
        try:
            await self._copy(id=sandbox_id, to_branch=branch)
        except BaseException:
            await cleaned_up(f"removing branch {branch}", self.prune(branch))
            raise

    async def prune(self, branch: str) -> None:
        """See `base.Backend.prune`. Raises BackendUnavailable when something stays behind."""
        answer = await self._link.ask("prune", branch=branch)
        if "error" in answer:
            raise BackendUnavailable(
                f"branch {branch} could not be removed: {answer['error']}", phase=Phase.DESTROY
            )

    async def store(
        self, store: ImageStore, name: str, sandbox_id: str, template: Template, base: Image | None
    ) -> int:
        """See `base.Backend.snapshot`; `base` is the image of the sandbox. Raises also ImageError."""
        try:
            check_name(name)
        except ImageError as error:
            raise InvalidRequest(str(error)) from error
        below = base.layers if base is not None else ()
        if len(below) + len(template.branches) >= LAYER_LIMIT:
            raise ImageError(f"the image would have more than {LAYER_LIMIT} layers")
        sources = [{"from_branch": branch} for branch in template.branches] + [{"id": sandbox_id}]
        # Named by chance, not by content: to read it all once more would double what it costs.
        digests = [secrets.token_hex(32) for _ in sources]
        # Locks of other processes are waited for, which must not hold up the daemon.
        await asyncio.to_thread(store.open)
        with await _importing(store):
            try:
                layers = [await self._layer(store, *each) for each in zip(digests, sources, strict=True)]
                image = Image(
                    layers=(*below, *layers),
                    env=base.env if base is not None else {},
                    source=f"snapshot of {sandbox_id}",
                    created=time.time(),
                    host_system=base is None or base.host_system,
                )
                await in_thread(store.add, name, image)
            except BaseException:
                # Nobody else has layers of these names, and the next collection may be far.
                dropping = in_thread(store.drop_unnamed, digests)
                await cleaned_up(f"removing the layers of {name}", dropping)
                raise
        return sum(layer.size for layer in layers)

    async def _layer(self, store: ImageStore, digest: str, source: dict[str, str]) -> Layer:
        partial = store.partial()
        directory = partial.__enter__()
        try:
            tree = directory / "tree"
            self._make(tree)
            size = await self._copy(**source, to_partial=directory.name)
            await in_thread(store.add_layer, digest, tree)
        finally:
            # In a thread: what is removed may be large.
            await in_thread(partial.__exit__, None, None, None)
        return Layer(digest, size)

    def _make(self, tree: Path) -> None:
        """The launcher's own user fills it."""
        tree.mkdir(mode=0o755)
        if users.has_range(self._uid_base):
            os.chown(tree, self._uid_base, self._uid_base)

    async def _copy(self, **what: str) -> int:
        """Returns the bytes of files. Raises StartFailed, SandboxLost.

        When cancelled it has the copy end, and waits for that: only then can what is there be removed.
        """
        asked = asyncio.ensure_future(self._link.ask("copy", within=COPY_SECONDS, **what))
        try:
            answer = await asyncio.shield(asked)
        except asyncio.CancelledError:
            target = what.get("to_branch") or what["to_partial"]
            await cleaned_up(f"ending the copy to {target}", self._given_up(asked, target))
            raise
        if "ended" in answer:
            raise SandboxLost(f"sandbox {what['id']}: {answer['ended']}", phase=Phase.FILE)
        if "error" in answer:
            raise StartFailed(
                f"the files could not be copied: {answer['error']}", phase=Phase.CREATE, retryable=False
            )
        size: int = answer["size"]
        return size

    async def _given_up(self, asked: asyncio.Future[dict[str, Any]], target: str) -> None:
        # Where that fails nothing is known of the copy's end, and it is not waited for.
        await self._link.ask("give up", copy=target)
        await asyncio.wait([asked])


async def _importing(store: ImageStore) -> contextlib.ExitStack:
    """`ImageStore.importing`, entered. Where that waited and its caller has left, it is left at once."""

    def enter() -> contextlib.ExitStack:
        stack = contextlib.ExitStack()
        stack.enter_context(store.importing())
        return stack

    return await whole(asyncio.to_thread(enter), contextlib.ExitStack.close)
