"""Files and sockets that a killed daemon left, that are another program's, or that are not where was said."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sandboxd.config import ConfigError, load

from .test_bad_values import FAKE, command


def test_files_of_a_fake_daemon_that_was_killed_are_taken_away(tmp_path: Path) -> None:
    state = tmp_path / "a"
    for end in (signal.SIGKILL, signal.SIGTERM):
        with subprocess.Popen(serve(state), stdout=subprocess.PIPE) as daemon:
            assert daemon.stdout is not None
            address = daemon.stdout.readline().decode().split(" serving ")[1].split(";")[0]
            assert list((state / "fake").iterdir()) == []
            run = command("exec", "--address", address, "python", "--", "sh", "-c", "echo there; sleep 1000")
            with subprocess.Popen(run, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as holder:
                assert holder.stdout is not None
                assert holder.stdout.readline() == b"there\n"
                assert len(list((state / "fake").iterdir())) == 1
                if end is signal.SIGKILL:
                    daemon.kill()
                holder.kill()
            daemon.terminate()
    assert not (state / "fake").exists()


def serve(state: Path, *listen: str) -> list[str]:
    config = state.with_suffix(".toml")
    config.write_text(f"drain_seconds = 0\n{FAKE}")
    options = [word for address in listen for word in ("--listen", address)]
    command = [sys.executable, "-m", "sandboxd", "serve", "--config", config, "--state-dir", state, *options]
    return list(map(str, command))


def test_the_socket_of_a_killed_daemon_is_no_obstacle(tmp_path: Path) -> None:
    """Also where it is not in the state directory: a supervisor starts the next one, and nobody tidies up."""
    path = tmp_path / "elsewhere.sock"
    for end in (signal.SIGKILL, signal.SIGTERM):
        with subprocess.Popen(serve(tmp_path / "a", f"unix:{path}"), stdout=subprocess.PIPE) as daemon:
            assert daemon.stdout is not None
            assert str(path).encode() in daemon.stdout.readline()
            if end is signal.SIGTERM:
                second = serve(tmp_path / "b", f"unix:{path}")
                done = subprocess.run(second, capture_output=True, text=True, timeout=60)
                assert done.returncode == 2
                assert "another program serves there; stop it" in done.stderr
            daemon.send_signal(end)
        assert path.exists() is (end is signal.SIGKILL)


def test_a_file_in_the_place_of_a_socket_is_left(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("mine")
    done = subprocess.run(serve(tmp_path / "a", f"unix:{path}"), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "the path exists and is no socket; remove it" in done.stderr
    assert path.read_text() == "mine"


def test_a_port_out_of_range_is_not_another_port(tmp_path: Path) -> None:
    """The resolver takes it modulo 65536."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    done = subprocess.run(
        serve(tmp_path / "a", f"127.0.0.1:{port + 65536}"), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "a port is a number from 0 to 65535" in done.stderr
    config = tmp_path / "sandboxd.toml"
    for key in ("metrics", "web"):
        config.write_text(f'{key} = "127.0.0.1:{port + 65536}"\n')
        with pytest.raises(ConfigError, match="must be HOST:PORT"):
            load(config)
