"""`sandboxd completion` has a real shell complete what is typed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from sandboxd.cli import main

TYPED = {
    "sandboxd be": "bench",
    "sandboxd bench bu": "burst",
    "sandboxd bench burst --co": "--count",
    "sandboxd serve --log-level D": "DEBUG",
    "sandboxd serve --config set": "settings.toml",
}


@pytest.mark.parametrize("typed", TYPED)
def test_bash_completes(typed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    (tmp_path / "complete").write_text(capsys.readouterr().out)
    (tmp_path / "settings.toml").touch()
    words = typed.split()
    script = (
        "source ./complete\n"
        f"COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}\n"
        '_shtab_sandboxd; echo "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [TYPED[typed]]
    assert not done.stderr


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_can_read_theirs(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    written = capsys.readouterr().out
    assert "burst" in written
    if shutil.which(shell):
        (tmp_path / "complete").write_text(written)
        subprocess.run([shell, "-n", str(tmp_path / "complete")], check=True)
