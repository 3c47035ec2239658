"""Errors of files by name."""

import errno
import os
from pathlib import Path

import pytest

from tf2dist import render
from tf2dist.errors import ConfigError, FitError, TrainingError
from tf2dist.files import path_of, raising, warning, write_whole
from tf2dist.tools.finished import exporting, shell


def test_an_error_of_a_file_has_a_name_a_reason_and_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(TrainingError) as caught, raising("run_dir: cannot be written", "make room", TrainingError):
        (tmp_path / "missing" / "file").write_text("")
    assert str(caught.value) == "run_dir: cannot be written (No such file or directory); make room"
    with pytest.raises(ConfigError) as other, raising("x: cannot be read", also=(ValueError,)):
        b"\xff".decode()
    assert str(other.value) == "x: cannot be read (it is not text)"


def test_errors_that_have_a_name_and_others_pass() -> None:
    with pytest.raises(FitError, match="mine"), raising("x: cannot be read", also=(ValueError,)):
        raise FitError("mine")
    with pytest.raises(ValueError, match="other"), raising("x: cannot be read"):
        raise ValueError("other")


@pytest.mark.parametrize("home", ["~nosuchuser", "~nosuchuser/runs/a"])
def test_a_home_directory_that_there_is_not(home: str, tmp_path: Path) -> None:
    """A shell leaves such a name as it is."""
    words = r"\(~nosuchuser.*\): there is no such home directory; give the path without ~"
    with pytest.raises(ConfigError, match=rf"RUN_DIR {words}"):
        shell.read_command_line([home], ())
    with pytest.raises(ConfigError, match=rf"plugins {words}"):
        shell.read_command_line([str(tmp_path), f"plugins=[{home}]"], ("plugins",))
    with pytest.raises(ConfigError, match=rf"OUT {words}"):
        exporting.export(shell.read_command_line([str(tmp_path), home], ()))
    with pytest.raises(ConfigError, match=rf"--out {words}"):
        render.write("", home)
    assert path_of("--out", "~/a") == Path.home() / "a"


def test_processes_that_write_one_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    def write() -> None:
        for _ in range(200):
            write_whole(tmp_path / "file", os.urandom(4096))

    other = os.fork()
    if not other:
        try:
            write()
        except BaseException:
            os._exit(1)
        os._exit(0)
    write()
    assert os.waitpid(other, 0)[1] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_file_that_can_be_done_without_is_a_warning() -> None:
    warnings: list[str] = []
    with warning(warnings.append, "sweep.csv could not be written", "the sweep goes on"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert warnings == ["sweep.csv could not be written (No space left on device); the sweep goes on"]
