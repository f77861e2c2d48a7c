"""A small server that speaks OpenAI's chat completions, and says what a function tells it to."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Messages = list[dict[str, str]]


@dataclass
class Answer:
    """What one request gets. `raw` takes the place of a chat completion."""

    text: str | None = None
    status: int = 200
    finish_reason: str = "stop"
    raw: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> str:
        message = {"role": "assistant", "content": self.text}
        choice = {"index": 0, "message": message, "finish_reason": self.finish_reason}
        usage = {"prompt_tokens": 7, "completion_tokens": 3}
        return self.raw or json.dumps({"choices": [choice], "usage": usage})


@dataclass
class Server:
    """`requests` are the bodies received, `keys` their Authorization headers."""

    url: str
    requests: list[dict[str, Any]]
    keys: list[str | None]


@contextmanager
def serving(reply: Callable[[Messages], Answer]) -> Iterator[Server]:
    """Serves for the length of the block, on a port of its own."""
    requests: list[dict[str, Any]] = []
    keys: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append({"path": self.path, **body})
            keys.append(self.headers.get("Authorization"))
            answer = reply(body["messages"])
            sent = answer.body().encode()
            self.send_response(answer.status)
            for name, value in {**answer.headers, "Content-Length": str(len(sent))}.items():
                self.send_header(name, value)
            self.end_headers()
            with suppress(ConnectionError):  # whoever asked may have gone
                self.wfile.write(sent)

        def log_message(self, *arguments: object) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield Server(f"http://127.0.0.1:{server.server_port}/v1", requests, keys)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
