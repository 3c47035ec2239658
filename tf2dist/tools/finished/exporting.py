"""Exports the model of a run to the formats of other programs, with Keras's own `Model.export`."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from tf2dist import signals
from tf2dist.errors import ConfigError, InstallationError, TrainingError, brief_reason, reason_of
from tf2dist.files import path_of
from tf2dist.tools.finished.shell import CommandLine, one_of, show_status


@dataclass(frozen=True)
class Format:
    """A format of exported models.

    Attributes:
        in_keras: its name for `keras.Model.export`.
        file: the default name of the file or folder in the run directory.
        needs: a module that must be installed in addition; the extra with the name of the format has it.
    """

    in_keras: str
    file: str
    needs: str | None = None


FORMATS = {
    "saved_model": Format("tf_saved_model", "saved_model"),
    "onnx": Format("onnx", "model.onnx", needs="tf2onnx"),
    "litert": Format("litert", "model.tflite"),
}


def export(line: CommandLine) -> Path:
    """Writes the exported file or folder, whole or not at all; returns its path."""
    name = one_of("format", line.options.get("format", "saved_model"), list(FORMATS))
    target_format = FORMATS[name]
    # All that can be refused without the model comes before TensorFlow, whose import takes seconds.
    if target_format.needs and importlib.util.find_spec(target_format.needs) is None:
        raise InstallationError(
            f"format ({name}): needs {target_format.needs}, which is not installed; pip install '.[{name}]'"
        )
    out = path_of("OUT", *line.operands).absolute() if line.operands else line.run_dir / target_format.file
    check_free(out)

    show_status(f"export: loading the model of {line.run_dir}")
    # These import TensorFlow.
    from tf2dist.tf_internals.keras import inputs_of
    from tf2dist.tools.finished.opening import model_of

    model = model_of(line)
    try:
        # Keras exports only models to ONNX that have been called.
        if inputs := inputs_of(model):
            model(inputs if len(inputs) > 1 else inputs[0])
        # In a folder beside OUT, so on the same file system, where moving is one atomic step.
        with signals.temporary_folder(out.parent, ".part-export-") as folder:
            part = folder / target_format.file
            model.export(part, format=target_format.in_keras, verbose=False)
            part.replace(out)
    except OSError as error:
        raise ConfigError(f"OUT ({out}): cannot be written ({brief_reason(error)}); name another place") from None
    except Exception as error:  # the converters raise errors of many types
        reason = f"{type(error).__name__}: {reason_of(error)}"
        raise TrainingError(f"format ({name}): the model cannot be exported ({reason}); try another format") from error
    return out


def check_free(out: Path) -> None:
    """Makes sure that `out` is in an existing folder, and is missing or empty."""
    if not out.parent.is_dir():
        raise ConfigError(f"OUT ({out}): there is no folder {out.parent}; make it first")
    if out.is_symlink() or (out.is_file() and out.stat().st_size) or (out.is_dir() and any(out.iterdir())):
        raise ConfigError(f"OUT ({out}): exists and is not empty; remove it, or name another one")
