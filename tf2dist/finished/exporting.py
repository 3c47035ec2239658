"""A run's model in the formats of other programs; Keras itself does the work."""

import contextlib
import importlib.util
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tf2dist.errors import ConfigError, InstallationError, TrainingError, first_line
from tf2dist.finished.shell import Request, one_of


@dataclass(frozen=True)
class Format:
    """One that can be asked for.

    Attributes:
        in_keras: its name for `keras.Model.export`.
        file: what it is called in the run directory.
        needs: the module that must be there beside TensorFlow, from the extra of the format's own name.
    """

    in_keras: str
    file: str
    needs: str | None = None


FORMATS = {
    "saved_model": Format("tf_saved_model", "saved_model"),
    "onnx": Format("onnx", "model.onnx", needs="tf2onnx"),
    "litert": Format("litert", "model.tflite"),
}


def export(request: Request) -> Path:
    """Makes the file or folder asked for, whole or not at all; returns where it is.

    Raises:
        RequestError: it cannot be made so.
        TrainingError: Keras could not make it, or it could not be written.
    """
    name = one_of("format", request.options.get("format", "saved_model"), list(FORMATS))
    made = FORMATS[name]
    if made.needs and importlib.util.find_spec(made.needs) is None:
        raise InstallationError(
            f"format ({name}): needs {made.needs}, which is not installed; pip install 'tf2dist[{name}]'"
        )
    out = Path(*request.operands).expanduser().absolute() if request.operands else request.run_dir / made.file
    check_free(out)

    from tf2dist.finished.opening import model_of  # imports TensorFlow

    model = model_of(request)
    try:
        if inputs := getattr(model, "inputs", None):  # Keras makes ONNX only of models that have been called
            model(inputs if len(inputs) > 1 else inputs[0])
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=".part-export-") as folder:
            part = Path(folder, made.file)
            model.export(part, format=made.in_keras, verbose=False)
            put(part, out)
    except OSError as error:
        raise ConfigError(f"OUT ({out}): cannot be written ({error.strerror or error}); name another place") from None
    except Exception as error:  # the converters raise errors of many kinds
        what = f"{type(error).__name__}: {first_line(str(error))}"
        raise TrainingError(f"format ({name}): the model cannot be exported ({what}); try another format") from error
    return out


def check_free(out: Path) -> None:
    """Raises ConfigError unless `out` does not exist or is empty, in a folder that does exist."""
    if not out.parent.is_dir():
        raise ConfigError(f"OUT ({out}): there is no folder {out.parent}; make it first")
    if out.is_symlink() or (out.is_file() and out.stat().st_size) or (out.is_dir() and any(out.iterdir())):
        raise ConfigError(f"OUT ({out}): exists; remove it, or name another one")


def put(part: Path, out: Path) -> None:
    """Moves what has been made to its place, with the rights that a new file or folder has.

    Raises:
        OSError: it cannot be moved, for example because something came there meanwhile.
    """
    if part.is_dir():
        part.replace(out)
        return
    with contextlib.suppress(FileNotFoundError):
        if not out.stat().st_size:
            out.unlink()
    os.link(part, out)
    shutil.copymode(part, out)
