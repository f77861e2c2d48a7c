"""The daemon's settings: what may be in its TOML file, with which default, and what each means.

This is the only module of the daemon that reads a settings file or the environment. Unknown keys are
refused with the nearest known one; every message names the key, the value and the way out.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from sandboxd import addresses
from sandboxd.backends.faults import Fault
from sandboxd.care import Care
from sandboxd.config_faults import Section, explain
from sandboxd.keepalive import KEEPALIVE_SECONDS
from sandboxd.ledger import Bounds
from sandboxd.pacing import Pace
from sandboxd.pool import PoolOptions
from sandboxd.regulator import APART_SECONDS, Regulation
from sandboxd.slots import Slots
from sandboxd.starting import RetryPolicy
from sandboxd.types import POOL_ID, Limits, Network, Template


class ConfigError(Exception):
    """The settings cannot be used; the message is one line for a person."""


def default_state_dir() -> Path:
    """Where a daemon of this user keeps its sockets and sandboxes."""
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "sandboxd"
    return Path("/run/sandboxd") if os.geteuid() == 0 else Path.home() / ".sandboxd"


def default_images_dir() -> Path:
    """Where this user's image store is: `SANDBOXD_IMAGES_DIR`, else beside other data that is kept."""
    if given := os.environ.get("SANDBOXD_IMAGES_DIR"):
        return Path(given)
    if os.geteuid() == 0:
        return Path("/var/lib/sandboxd/images")
    data = os.environ.get("XDG_DATA_HOME")
    return (Path(data) if data else Path.home() / ".local" / "share") / "sandboxd" / "images"


def default_address() -> str:
    """Where a client of this user finds its daemon: `SANDBOXD_ADDRESS`, else the default socket."""
    return os.environ.get("SANDBOXD_ADDRESS") or f"unix:{default_state_dir() / addresses.SOCKET_NAME}"


# A token must not be found by trying.
TOKEN_CHARACTERS = 16

Seconds = Annotated[float, Field(gt=0, le=1e7)]
Count = Annotated[int, Field(ge=0, le=1_000_000)]


class LimitsConfig(Section):
    """What one sandbox may use."""

    memory_bytes: Annotated[int, Field(ge=16 << 20)] | None = 512 << 20
    """Memory of all its processes together, in bytes."""
    cpu_count: Annotated[float, Field(gt=0, le=1024)] | None = None
    """Processors' worth of time; unlimited when unset."""
    pids: Annotated[int, Field(ge=4)] | None = 256
    """Processes and threads at once."""
    open_files: Annotated[int, Field(ge=16)] | None = 1024
    """Open files of each process."""
    disk_bytes: Annotated[int, Field(ge=1 << 20)] | None = None
    """Size of the writable layer in bytes; unlimited when unset. The namespace backend then keeps it in
    memory, where it counts against `memory_bytes`, too; Docker does not enforce it."""


class RetryConfig(Section):
    """How a failed start is repeated."""

    attempts: Annotated[int, Field(ge=1, le=100)] = 3
    """Attempts in all, the first one included; those that meet no backend do not count, up to 12."""
    budget_seconds: Seconds = 90.0
    """No attempt begins later than this after the first."""
    pause_seconds: Seconds = 0.25
    """The longest first pause; it doubles with each attempt."""
    pause_limit_seconds: Seconds = 8.0
    """No pause is longer than this, but where a failure says when to come back: a registry's rate limit."""


class PoolConfig(Section):
    """One pool of equal sandboxes."""

    backend: Literal["namespace", "docker", "fake"] = "namespace"
    """What makes the sandboxes."""
    image: str | None = None
    """The image: Docker's name of it, or that under which it was imported (namespace); the host's own system
    directories when unset (namespace only)."""
    runtime: str | None = None
    """The Docker Engine's runtime, `runsc` say; its default when unset."""
    warm: Count = 8
    """Sandboxes kept ready, at least."""
    warm_limit: Count | None = None
    """Sandboxes kept ready at most, as demand asks for; as many as `warm` when unset."""
    size_limit: Annotated[int, Field(ge=1, le=100_000)] = 1024
    """Sandboxes that may exist at once, in any state; cut to what the host carries
    ([operations](operations.md))."""
    start_limit: Annotated[int, Field(ge=1, le=1024)] = 64
    """Sandboxes that may be starting at once, at most; how many do is found out."""
    start_limit_min: Annotated[int, Field(ge=1, le=1024)] = 1
    """And at least; equal to `start_limit`, it is always that many."""
    starts_per_second: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Starts of this pool, repeated ones included, that may begin in a second on average, and a second's
    worth at once; any number when unset."""
    waiting_limit: Count = 10_000
    """Callers that may wait at once; who would be served last beyond that hears QUEUE_FULL."""
    ttl_seconds: Seconds = 300.0
    """How long a lease lasts when the caller does not say."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment of every command; nothing is inherited from the host."""
    cwd: str = "/workspace"
    """Working directory of every command; made if it is missing."""
    setup: list[str] = Field(default_factory=list)
    """A command run once in each new sandbox before it counts as ready."""
    users: bool = False
    """Whether commands may name a user, root say; it has no capabilities. Only on the namespace backend, of a
    daemon that root runs ([isolation](isolation.md#users))."""
    network: Literal["none", "host"] = "none"
    """`none` is the sandbox's own loopback; `host` takes the isolation away."""
    start_timeout_seconds: Seconds = 30.0
    """How long one attempt to start may take."""
    pull_timeout_seconds: Seconds = 600.0
    """How long fetching the image may take."""
    check_seconds: Annotated[float, Field(ge=0, le=1e7)] = 30.0
    """A ready sandbox that has not answered for so long is asked before it is leased; 0 never asks."""
    max_uses: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    """How often one sandbox may be leased; it is reset in between, and not used again in doubt. Costs more
    than a new sandbox each time: leave it. Not on Docker."""
    quarantine_limit: Count = 0
    """Failed sandboxes that are kept to be looked at."""
    quarantine_seconds: Seconds = 600.0
    """How long each of them is kept."""
    limits: LimitsConfig = LimitsConfig()
    retry: RetryConfig = RetryConfig()

    @field_validator("cwd")
    @classmethod
    def _absolute(cls, value: str) -> str:
        if not value.startswith("/"):
            raise ValueError("must be an absolute path")
        return value

    @field_validator("image", "runtime")
    @classmethod
    def _named(cls, value: str | None) -> str | None:
        if value == "":
            raise ValueError("must be a name; leave the key out for none")
        return value

    @field_validator("env")
    @classmethod
    def _visible(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if not name or "=" in name:
                raise ValueError(f"environment name {name!r} is not one that a program can see")
        return value

    @field_validator("cwd", "setup")
    @classmethod
    def _runnable(cls, value: str | list[str]) -> str | list[str]:
        if value and not value[0]:
            raise ValueError("must begin with the program to run")
        return value

    @field_validator("warm_limit")
    @classmethod
    def _above_warm(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and value < info.data.get("warm", 0):
            raise ValueError(f"must not be below warm, which is {info.data['warm']}")
        return value

    @field_validator("max_uses")
    @classmethod
    def _resettable(cls, value: int, info: ValidationInfo) -> int:
        if value > 1 and info.data.get("backend") == "docker":
            raise ValueError("a container cannot be proven to be as new; leave it at 1, or use namespace")
        return value

    @field_validator("start_limit_min")
    @classmethod
    def _below_limit(cls, value: int, info: ValidationInfo) -> int:
        if value > info.data.get("start_limit", value):
            raise ValueError(f"must not be above start_limit, which is {info.data['start_limit']}")
        return value

    @model_validator(mode="after")
    def _has_image(self) -> PoolConfig:
        if self.backend == "docker" and self.image is None:
            raise ValueError("the docker backend has no image of its own: set image")
        return self

    def template(self, name: str) -> Template:
        """What the backend needs to know."""
        return Template(
            name=name,
            image=self.image,
            env={os.fsencode(k): os.fsencode(v) for k, v in self.env.items()},
            cwd=os.fsencode(self.cwd),
            setup=tuple(os.fsencode(word) for word in self.setup),
            limits=Limits(**self.limits.model_dump()),
            network=Network(self.network),
            runtime=self.runtime,
            start_timeout=self.start_timeout_seconds,
            pull_timeout=self.pull_timeout_seconds,
            users=self.users,
        )

    def options(self, weights: Mapping[str, int] | None = None, slots: Slots | None = None) -> PoolOptions:
        """What the pool needs to know; `weights` are those of the tenants, `slots` those of its backend."""
        return PoolOptions(
            bounds=Bounds(
                warm_target=min(self.warm, self.size_limit),
                size_limit=self.size_limit,
                start_limit=self.start_limit,
                waiting_limit=self.waiting_limit,
                weights=dict(weights or {}),
                quarantine_limit=self.quarantine_limit,
            ),
            default_ttl=self.ttl_seconds,
            retry=RetryPolicy(
                attempts=self.retry.attempts,
                budget=self.retry.budget_seconds,
                pause=self.retry.pause_seconds,
                pause_limit=self.retry.pause_limit_seconds,
            ),
            care=Care(self.check_seconds, self.quarantine_seconds, self.max_uses),
            regulation=Regulation(
                slots=slots,
                starts_per_second=self.starts_per_second,
                warm_limit=None if self.warm_limit is None else min(self.warm_limit, self.size_limit),
                apart=APART_SECONDS,
            ),
        )


class TenantConfig(Section):
    """One of those that share the pools."""

    weight: Annotated[int, Field(ge=1, le=1000)] = 1
    """Its share of what waiting callers are given, beside the weights of the others that wait."""


class FakeConfig(Section):
    """How the fake backend behaves."""

    start_seconds: Annotated[float, Field(ge=0)] = 0.0
    """How long a start takes, in seconds."""


class Config(Section):
    """The whole file."""

    state_dir: Path = Field(default_factory=default_state_dir)
    """Sockets, locks, the journal and the sandboxes' writable layers. By default `$XDG_RUNTIME_DIR/sandboxd`;
    for root `/run/sandboxd`; else `~/.sandboxd`."""
    images_dir: Path = Field(default_factory=default_images_dir)
    """The image store of the namespace backend; `sandboxd image import` fills it. By default
    `SANDBOXD_IMAGES_DIR`; for root `/var/lib/sandboxd/images`; else `$XDG_DATA_HOME/sandboxd/images`
    (`~/.local/share`)."""
    listen: list[str] = Field(default_factory=list)
    """Addresses to serve, `unix:/path` or `host:port`; a socket in `state_dir` when empty."""
    keepalive_seconds: Seconds = KEEPALIVE_SECONDS
    """A connection that was silent for so long is pinged, so that proxies keep it, and cut off when the
    other end does not answer within a minute."""
    metrics: str | None = None
    """Where Prometheus may scrape the metrics, `host:port`; nowhere when unset. See
    [telemetry](telemetry.md)."""
    web: str | None = None
    """Where the [live page](operations.md#the-live-page) is, `host:port`; nowhere when unset."""
    web_names: list[str] = Field(default_factory=list)
    """Names by which browsers reach the page, besides addresses and `localhost`; other names are refused."""
    web_token_file: Path | None = None
    """A file whose one line lets the page's users end leases and change pools; it shows only when unset."""
    web_runs: list[Path] = Field(default_factory=list)
    """Directories of training runs (`runs/NAME`) whose `metrics.jsonl` the page shows."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """What goes to standard error."""
    drain_seconds: Annotated[float, Field(ge=0, le=86400)] = 30.0
    """How long leases may go on after SIGTERM or Ctrl-C before their sandboxes are reclaimed; set it to the
    length of an episode."""
    pools: dict[str, PoolConfig] = Field(default_factory=lambda: {"python": PoolConfig()})
    """The pools, by name; one pool `python` by default."""
    tenants: dict[str, TenantConfig] = Field(default_factory=dict)
    """Who shares the pools, by name; who is not named has the default weight."""
    fake: FakeConfig = FakeConfig()
    faults: tuple[Fault, ...] = ()
    """Faults on purpose, on every backend: `["fail start 0.2", "hang ready 0.05", "die 0.02"]`."""
    fault_seed: int = 0
    """What the faults are drawn from: the same seed, the same faults."""

    @field_validator("faults", mode="before")
    @classmethod
    def _faults(cls, value: object) -> object:
        return [Fault.parse(text) for text in value] if isinstance(value, list | tuple) else value

    @field_validator("pools")
    @classmethod
    def _names(cls, value: dict[str, PoolConfig]) -> dict[str, PoolConfig]:
        for name in value:
            if not POOL_ID.fullmatch(name):
                raise ValueError(f"pool name {name!r} must be lower-case letters, digits and dashes")
        if not value:
            raise ValueError("at least one pool is needed")
        return value

    @field_validator("metrics", "web")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                addresses.split(value)
            except ValueError:
                raise ValueError("must be HOST:PORT, as in 127.0.0.1:9464") from None
        return value

    @field_validator("state_dir", "images_dir", mode="before")
    @classmethod
    def _directory(cls, value: object) -> object:
        # Not the working directory, whatever lies there: a variable of a shell was empty.
        if value == "":
            raise ValueError("must be a directory; leave it out for the default")
        return value

    @field_validator("tenants")
    @classmethod
    def _tenants(cls, value: dict[str, TenantConfig]) -> dict[str, TenantConfig]:
        for name in value:
            if not POOL_ID.fullmatch(name):
                raise ValueError(f"tenant name {name!r} must be lower-case letters, digits and dashes")
        return value

    def weights(self) -> dict[str, int]:
        """The shares of the tenants that are named."""
        return {name: tenant.weight for name, tenant in self.tenants.items()}

    def pace(self, backend: str) -> Pace:
        """The limit on starts at once that all pools of a backend share; it begins at two a processor."""
        pools = [pool for pool in self.pools.values() if pool.backend == backend]
        return Pace(
            floor=max(pool.start_limit_min for pool in pools),
            ceiling=max(pool.start_limit for pool in pools),
            first=2 * (os.cpu_count() or 1),
        )

    def web_token(self) -> str | None:
        """What lets the page's users change something; None where nothing does. Raises ConfigError."""
        if self.web_token_file is None:
            return None
        try:
            token = self.web_token_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise ConfigError(f"web_token_file {self.web_token_file} cannot be read: {why}") from error
        if len(token) < TOKEN_CHARACTERS:
            raise ConfigError(
                f"web_token_file {self.web_token_file} holds {len(token)} characters: write at least"
                f" {TOKEN_CHARACTERS}, as `openssl rand -hex 16` gives them"
            )
        return token

    def addresses(self) -> list[str]:
        """Where the daemon listens."""
        return self.listen or [f"unix:{self.state_dir / addresses.SOCKET_NAME}"]


def load(path: Path | None, **overrides: object) -> Config:
    """Reads a settings file (none: all defaults); `overrides` win over it.

    Raises ConfigError with one line that names the file, the key, the value and what is allowed.
    """
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = tomllib.loads(path.read_text())
        except OSError as error:
            raise ConfigError(f"cannot read the settings file {path}: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not valid TOML: {error}") from error
    values.update({key: value for key, value in overrides.items() if value is not None})
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{path or 'settings'}: {explain(error, Config)}") from error
