"""Who may ask for what: names of the host, tokens, and the headers that keep other sites away."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Awaitable, Callable, Collection

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

HEADERS = {
    # Nothing may be loaded from elsewhere, and nothing runs but the page's own files.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
    " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


def refused(status: int, words: str) -> web.Response:
    """One line for a person."""
    return web.Response(status=status, text=f"{words}\n", headers=HEADERS)


def is_own_name(host: str | None, names: Collection[str]) -> bool:
    """Whether a request's Host is this daemon: an address, `localhost`, or one of `names`.

    Another name that leads here may be a foreign site's, whose scripts would then count as ours.
    """
    name, colon, port = (host or "").rpartition(":")
    if not colon or not port.isdecimal():
        name = host or ""
    name = name.lower().rstrip(".")
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return name == "localhost" or name in {each.lower() for each in names}
    return True


class Guard:
    """Of one page. Without a `token` nothing can be changed."""

    def __init__(self, names: Collection[str], token: str | None) -> None:
        self._names = names
        self._token = None if token is None else token.encode()

    @property
    def actions(self) -> bool:
        """Whether anything can be changed by whoever has the token."""
        return self._token is not None

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Before every request, to paths that do not exist, too."""
        if not is_own_name(request.headers.get("Host"), self._names):
            return refused(
                421, f"{request.headers.get('Host')!r} is no name of this daemon: add it to web_names"
            )
        if request.headers.get("Sec-Fetch-Site", "none") not in ("same-origin", "none"):
            return refused(403, "another site's page may not ask this one")
        if request.method not in ("GET", "HEAD"):
            refusal = self._refusal(request)
            if refusal is not None:
                return refusal
        try:
            response = await handler(request)
        except web.HTTPException as error:
            return refused(error.status, error.text or error.reason)
        if not response.prepared:
            response.headers.update(HEADERS)
        return response

    def _refusal(self, request: web.Request) -> web.Response | None:
        if self._token is None:
            return refused(403, "this page is read-only: start the daemon with --web-token-file FILE")
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(
            given.strip().encode("utf-8", "surrogateescape"), self._token
        ):
            return refused(401, "the token is wrong or missing: it is what --web-token-file holds")
        return None
