"""Settings: every fault is one line with the key, the value and the way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from sandboxd.config import ConfigError, LimitsConfig, PoolConfig, RetryConfig, load


def write(directory: Path, text: str) -> Path:
    path = directory / "sandboxd.toml"
    path.write_text(text)
    return path


def test_defaults_make_a_usable_daemon(tmp_path: Path) -> None:
    config = load(None, state_dir=tmp_path)
    assert config.addresses() == [f"unix:{tmp_path}/sandboxd.sock"]
    assert config.pools["python"].backend == "namespace"


def test_a_pool_becomes_a_template_and_options(tmp_path: Path) -> None:
    text = '[pools.tool]\nbackend = "fake"\nwarm = 500\nsize_limit = 10\nenv = {A = "b"}\nlimits.pids = 99\n'
    pool = load(write(tmp_path, text)).pools["tool"]
    assert pool.template("tool").env == {b"A": b"b"}
    assert pool.template("tool").limits.pids == 99
    assert pool.options().bounds.warm_target == 10


# Of each setting of a pool another value than its own, and where it is to be found then.
ARRIVES: dict[str, tuple[object, str]] = {
    "image": ("base", "template.image"),
    "runtime": ("runsc", "template.runtime"),
    "warm": (11, "options.bounds.warm_target"),
    "warm_limit": (12, "options.regulation.warm_limit"),
    "size_limit": (13, "options.bounds.size_limit"),
    "start_limit": (14, "options.bounds.start_limit"),
    "starts_per_second": (16.0, "options.regulation.starts_per_second"),
    "waiting_limit": (17, "options.bounds.waiting_limit"),
    "ttl_seconds": (18.0, "options.default_ttl"),
    "env": ({"A": "b"}, "template.env"),
    "cwd": ("/there", "template.cwd"),
    "setup": (["true"], "template.setup"),
    "users": (True, "template.users"),
    "network": ("host", "template.network"),
    "start_timeout_seconds": (19.0, "template.start_timeout"),
    "pull_timeout_seconds": (20.0, "template.pull_timeout"),
    "check_seconds": (21.0, "options.care.check_seconds"),
    "max_uses": (22, "options.care.max_uses"),
    "quarantine_limit": (23, "options.bounds.quarantine_limit"),
    "quarantine_seconds": (24.0, "options.care.quarantine_seconds"),
    "limits.memory_bytes": (25 << 20, "template.limits.memory_bytes"),
    "limits.cpu_count": (2.6, "template.limits.cpu_count"),
    "limits.pids": (27, "template.limits.pids"),
    "limits.open_files": (28, "template.limits.open_files"),
    "limits.disk_bytes": (29 << 20, "template.limits.disk_bytes"),
    "retry.attempts": (30, "options.retry.attempts"),
    "retry.budget_seconds": (31.0, "options.retry.budget"),
    "retry.pause_seconds": (3.2, "options.retry.pause"),
    "retry.pause_limit_seconds": (33.0, "options.retry.pause_limit"),
}


def test_every_setting_of_a_pool_arrives_where_it_belongs() -> None:
    whole: dict[str, type[BaseModel]] = {"limits": LimitsConfig, "retry": RetryConfig}
    keys = [key for key in PoolConfig.model_fields if key not in (*whole, "backend", "start_limit_min")]
    keys += [f"{name}.{key}" for name, section in whole.items() for key in section.model_fields]
    assert set(keys) <= set(ARRIVES)
    values: dict[str, Any] = {"backend": "fake", "limits": {}, "retry": {}}
    for key, (value, _) in ARRIVES.items():
        section, _, name = key.rpartition(".")
        (values[section] if section else values)[name] = value
    pool = PoolConfig.model_validate(values)
    made = {"template": pool.template("p"), "options": pool.options()}
    for key in keys:
        value, path = ARRIVES[key]
        found: Any = made[path.partition(".")[0]]
        for part in path.split(".")[1:]:
            found = getattr(found, part)
        assert found == _encoded(value), key


def _encoded(value: object) -> object:
    """As a template has text that goes into a sandbox."""
    match value:
        case {"A": "b"}:
            return {b"A": b"b"}
        case ["true"]:
            return (b"true",)
        case "/there":
            return b"/there"
        case _:
            return value


def test_tenants_weigh_one_where_nothing_is_said(tmp_path: Path) -> None:
    text = "[tenants.nightly]\n[tenants.team]\nweight = 3\n[pools.p]\n"
    config = load(write(tmp_path, text))
    weights = {"nightly": 1, "team": 3}
    assert config.pools["p"].options(config.weights()).bounds.weights == weights


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[pools.a]\nwarmm = 3", "unknown key 'pools.a.warmm' = 3; did you mean 'warm'?"),
        ("[pools.a.limits]\nmemory = 3", "did you mean 'memory_bytes'?"),
        ("statedir = 'x'", "did you mean 'state_dir'?"),
        ("[pools.a]\nqqq = 3", "known here: backend, image"),
        ("[pools.a]\nwarm = -1", "pools.a.warm = -1: input should be greater than or equal to 0"),
        ("[pools.a]\nbackend = 'podman'", "pools.a.backend = 'podman'"),
        ("[pools.A]\nwarm = 1", "pool name 'A' must be lower-case"),
        ("[pools.a]\ncwd = 'x'", "pools.a.cwd = 'x': must be an absolute path"),
        ("[tenants.a]\nweight = 0", "tenants.a.weight = 0: input should be greater than or equal to 1"),
        ("[tenants.a]\nwieght = 2", "did you mean 'weight'?"),
        ("[tenants.A]\nweight = 2", "tenant name 'A' must be lower-case"),
        ("[tenants.A]\nweight = 2", "tenants: tenant name"),
        ("a = ", "is not valid TOML"),
        ("drain_seconds = '10'", "drain_seconds = '10': must be a number, without quotes"),
        ("[pools.a]\nwarm = true", "pools.a.warm = True: must be a number, without quotes"),
        ("[pools.a]\nlimits.memory_bytes = '512M'", "pools.a.limits.memory_bytes = '512M': must be a number"),
        ("[pools.a]\nimage = ''", "pools.a.image = '': must be a name; leave the key out for none"),
        ("[pools.a]\nimage = 3", "pools.a.image = 3: must be text, in quotes"),
        ("[pools.a]\nbackend = 'docker'", "pools.a: the docker backend has no image of its own: set image"),
        ("[pools.a]\nenv = { 'A=B' = '1' }", "environment name 'A=B' is not one that a program can see"),
        ('[pools.a]\nenv = { A = "x\\u0000" }', "pools.a.env: 'x\\x00' must be text in UTF-8, without a"),
        ("[pools.a]\nsetup = ['']", "pools.a.setup = ['']: must begin with the program to run"),
        ("[pools.a]\nsetup = 'make'", "pools.a.setup = 'make': must be a list, in brackets"),
        ('[pools.a]\ncwd = "/x\\u0000"', "pools.a.cwd = '/x\\x00': '/x\\x00' must be text in UTF-8"),
        (
            'web_runs = ["a\\u0000"]',
            "web_runs = ['a\\x00']: 'a\\x00' must be text in UTF-8",
        ),
        ("pools = 3", "pools = 3: must be a table"),
        ("listen = '127.0.0.1:1'", "listen = '127.0.0.1:1': must be a list, in brackets"),
        ("state_dir = ''", "state_dir = '': must be a directory; leave it out for the default"),
    ],
)
def test_a_fault_is_one_line_that_names_it(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(write(tmp_path, text))
    assert message in str(raised.value)
    assert "sandboxd.toml" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: No such file"):
        load(tmp_path / "none.toml")
