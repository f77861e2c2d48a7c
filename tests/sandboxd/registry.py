"""An image registry on a port of this host: serves one image, or refuses in the ways that registries do."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
CONFIG = "application/vnd.docker.container.image.v1+json"
LAYER = "application/vnd.docker.image.rootfs.diff.tar.gzip"


class Registry(ThreadingHTTPServer):
    """Speaks the part of the distribution protocol (version 2) that a pull uses.

    `busybox:latest` holds the layer it was made with; `limited:latest` answers 429; `slow:latest` never
    answers its manifest until `release` is set; every other name is unknown. `manifests` counts what was
    asked for.
    """

    daemon_threads = True

    def __init__(self, layer: bytes) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        packed = gzip.compress(layer, mtime=0)
        rootfs = {"type": "layers", "diff_ids": [_digest(layer)]}
        config = json.dumps(
            {"architecture": "amd64", "os": "linux", "config": {}, "rootfs": rootfs, "history": [{}]}
        ).encode()
        self.blobs = {_digest(packed): packed, _digest(config): config}
        self.manifest = json.dumps(
            {
                "schemaVersion": 2,
                "mediaType": MANIFEST,
                "config": {"mediaType": CONFIG, "size": len(config), "digest": _digest(config)},
                "layers": [{"mediaType": LAYER, "size": len(packed), "digest": _digest(packed)}],
            }
        ).encode()
        self.manifests: list[str] = []
        self.release = threading.Event()

    @property
    def host(self) -> str:
        """What an image's name begins with."""
        return f"127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Registry
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        words = self.path.strip("/").split("/")
        if words == ["v2"]:
            self._answer(200, b"{}", "application/json")
        elif words[-2] == "manifests":
            self._manifest(words[1])
        elif words[-1] in self.server.blobs:
            self._answer(200, self.server.blobs[words[-1]], "application/octet-stream")
        else:
            self._refuse(404, "BLOB_UNKNOWN")

    def _manifest(self, name: str) -> None:
        if self.command == "GET":
            self.server.manifests.append(name)
        if name == "slow":
            self.server.release.wait(60)
        if name == "limited":
            self._refuse(429, "TOOMANYREQUESTS")
        elif name == "busybox":
            self._answer(200, self.server.manifest, MANIFEST)
        else:
            self._refuse(404, "MANIFEST_UNKNOWN")

    def _refuse(self, status: int, code: str) -> None:
        body = json.dumps({"errors": [{"code": code, "message": code.lower().replace("_", " ")}]})
        self._answer(status, body.encode(), "application/json")

    def _answer(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Docker-Content-Digest", _digest(body))
        self.end_headers()
        if self.command != "HEAD":
            with contextlib.suppress(ConnectionError):
                self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Says nothing."""


@contextlib.contextmanager
def registry(layer: bytes) -> Iterator[Registry]:
    """A running registry."""
    with Registry(layer) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.release.set()
            server.shutdown()
            thread.join()


def _digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()
