"""The command lines for finished runs: what is refused before TensorFlow is imported, and --help."""

from pathlib import Path

import pytest

from tests.e2e.test_run_commands import typed


@pytest.mark.parametrize(
    ("module", "arguments", "words"),
    [
        ("export", [], "RUN_DIR: is missing"),
        (
            "export",
            ["RUN", "formt=onnx"],
            "formt: there is no such option; the options are format, step, plugins",
        ),
        (
            "export",
            ["RUN", "format=onix"],
            "format (onix): must be one of saved_model, onnx, litert; did you",
        ),
        ("export", ["RUN", "a", "b"], "b: is one argument too many"),
        ("export", ["RUN", "nowhere/out"], "there is no folder"),
        ("export", ["RUN", "plugins=[nowhere.py]"], "nowhere.py): there is no such file"),
        ("predict", ["nowhere"], "RUN_DIR (nowhere): there is no such folder; name the directory of a run"),
        ("predict", ["RUN", "--json"], "--json: there is no such flag"),
        (
            "evaluate",
            ["RUN", "split=tests"],
            "split (tests): must be one of test, validation, train; did you",
        ),
        ("evaluate", ["RUN", "step=last"], "step (last): must be the step of a checkpoint, such as 1000"),
        ("plot", ["nowhere"], "RUN_DIR (nowhere): there is no such folder; name the directory of a run"),
        ("plot", ["RUN", "step=1"], "step: there is no such option; the options are none"),
        ("plot", ["RUN"], "): has no metrics.jsonl; name the directory of a run"),
    ],
)
def test_a_wrong_command_line_is_refused_in_one_line(
    module: str, arguments: list[str], words: str, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    given = [argument.replace("RUN", str(tmp_path / "run")) for argument in arguments]
    finished = typed(module, *given, folder=tmp_path)
    assert finished.code == 2
    assert finished.stdout == ""
    assert finished.stderr.startswith("tf2dist: error: ")
    assert finished.stderr.count("\n") == 1
    assert words in finished.stderr


@pytest.mark.parametrize("module", ["export", "predict", "evaluate", "plot"])
def test_help_shows_the_command_line(module: str, tmp_path: Path) -> None:
    finished = typed(module, "--help", folder=tmp_path)
    assert (finished.code, finished.stderr) == (0, "")
    assert f"python -m tf2dist.{module} RUN_DIR" in finished.stdout
