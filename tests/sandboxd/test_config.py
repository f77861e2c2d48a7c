"""Settings: every fault is one line with the key, the value and the way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandboxd.config import ConfigError, load


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
        ('[pools.a]\nenv = { A = "x\\u0000" }', "environment name 'A' is not one that a program can see"),
        ("[pools.a]\nsetup = ['']", "pools.a.setup = ['']: must begin with the program to run"),
        ("[pools.a]\nsetup = 'make'", "pools.a.setup = 'make': must be a list, in brackets"),
        ('[pools.a]\ncwd = "/x\\u0000"', "must not contain a zero byte"),
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
