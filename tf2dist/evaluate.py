"""``python -m tf2dist.evaluate RUN_DIR [split=test|validation|train] [data=NAME] [step=N] [plugins=[FILE.py]]``

Evaluates the model of a run on the data of that run, or on another registered data set, and prints its loss and
metrics, one a line, and the number of examples. Options data.* apply to that data. With step=N it takes the weights
of that checkpoint, otherwise those that the run has evaluated at its end. A model or data with code of your own needs
the files in which that is: plugins=[FILE.py].

Exit code 0 done, 2 the request is wrong, 3 the loss is not finite.
"""

from typing import NoReturn

from tf2dist.tools.finished import shell

OPTIONS = ("split", "data", "data.", "step", "plugins")


def main() -> NoReturn:
    """Evaluates what the command line asks for, and exits."""
    shell.main(run, __doc__)


def run(arguments: list[str]) -> None:
    """Evaluates, and prints the result.

    Raises:
        RequestError: the request is wrong.
        NotFiniteError: the loss is not finite.
    """
    line = shell.read_command_line(arguments, OPTIONS, max_operands=0)
    shell.one_of("split", line.options.get("split", "test"), ("test", "validation", "train"))
    shell.show_status(f"evaluate: loading the model of {line.run_dir}")
    from tf2dist.tools.finished.predicting import evaluate  # imports TensorFlow

    evaluate(line)


if __name__ == "__main__":
    main()
