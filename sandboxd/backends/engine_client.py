"""The Docker SDK's client, whose failures leave no socket open.

Where the SDK cannot connect, or gets no version, it leaves its sockets to the garbage collector. A daemon has
that run when it is quiet, and until then each call of an Engine that is away would cost a descriptor.
"""

from __future__ import annotations

import socket
from typing import Any

import docker
import docker.constants
import docker.errors
import requests
from docker.transport.unixconn import UnixHTTPAdapter, UnixHTTPConnection, UnixHTTPConnectionPool


class _Connection(UnixHTTPConnection):
    def connect(self) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(self.timeout)
            sock.connect(self.unix_socket)
        except BaseException:
            sock.close()
            raise
        self.sock = sock


class _Connections(UnixHTTPConnectionPool):
    seconds = 0

    def _new_conn(self) -> Any:
        return _Connection(self.base_url, self.socket_path, self.seconds)


class _Adapter(UnixHTTPAdapter):
    def get_connection(self, url: bytes | str, proxies: object = None) -> _Connections:
        with self.pools.lock:
            known: _Connections | None = self.pools.get(url)
            if known is None:
                known = _Connections(str(url), self.socket_path, self.timeout, maxsize=self.max_pool_size)
                known.seconds = self.timeout
                self.pools[url] = known
        return known


def connected(url: str, seconds: int, threads: int) -> tuple[docker.APIClient, dict[str, Any]]:
    """A client of the Engine at `url` for so many threads, each of whose calls takes `seconds` at most, and
    the Engine's `info`. Raises docker.errors.DockerException, requests' exceptions.
    """

    def client(version: str) -> docker.APIClient:
        made = docker.APIClient(base_url=url, version=version, timeout=seconds, max_pool_size=threads)
        path = "http+unix:///" + url.partition("://")[2].lstrip("/")
        made.mount("http+docker://", _Adapter(path, seconds, max_pool_size=threads))
        return made

    asking = client(docker.constants.DEFAULT_DOCKER_API_VERSION)
    try:
        version = asking.version(api_version=False)["ApiVersion"]
    except (requests.exceptions.RequestException, docker.errors.APIError, LookupError, ValueError) as error:
        raise docker.errors.DockerException(f"it does not tell its version: {error}") from error
    finally:
        asking.close()
    api = client(version)
    try:
        return api, api.info()
    except docker.errors.APIError as error:
        api.close()
        raise docker.errors.DockerException(f"it does not tell what it is: {error}") from error
    except BaseException:
        api.close()
        raise
