"""``python -m tf2dist.export RUN_DIR [OUT] [format=saved_model|onnx|litert] [step=N] [plugins=[FILE.py]]``

Makes of the model of a run what other programs load, without this package and without Keras:

    saved_model    a folder for TensorFlow (model = tf.saved_model.load(OUT), then model.serve(x)) and its servers
    onnx           a file for ONNX Runtime and many others; needs pip install '.[onnx]'
    litert         a file for LiteRT, once TensorFlow Lite; pip install '.[litert]' has what runs it

OUT is RUN_DIR/saved_model, model.onnx or model.tflite unless another is named; it must not exist yet, or be
empty. What is exported takes a batch of what the run's data gives: images as float32 from 0 to 255. With step=N
it has the weights of that checkpoint, otherwise those that the run has evaluated at its end. A model with
classes of your own needs the files in which they are: plugins=[FILE.py].
"""

from typing import NoReturn

from tf2dist.launch.console import show_lines
from tf2dist.tools.finished import shell

OPTIONS = ("format", "step", "plugins")


def main() -> NoReturn:
    """Exports what the command line asks for, and exits."""
    shell.main(run, __doc__)


def run(arguments: list[str]) -> None:
    """Exports, and prints where to.

    Raises:
        RequestError: the request is wrong.
        TrainingError: it could not be done.
    """
    line = shell.read_command_line(arguments, OPTIONS, max_operands=1)
    from tf2dist.tools.finished import exporting  # its checks come before TensorFlow, its work after

    out = exporting.export(line)
    show_lines(str(out))


if __name__ == "__main__":
    main()
