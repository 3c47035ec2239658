"""The command `predict`: apart from its module, which cannot be imported beside the function `tf2dist.predict`."""

from typing import NoReturn

from tf2dist.tools.finished import shell

OPTIONS = ("data", "data.", "step", "plugins")


def main(usage: str) -> NoReturn:
    """Predicts what the command line asks for, and exits."""
    shell.main(run, usage)


def run(arguments: list[str]) -> None:
    """Prints the predictions.

    Raises:
        RequestError: the request is wrong.
    """
    line = shell.read_command_line(arguments, OPTIONS)
    shell.show_status(f"predict: loading the model of {line.run_dir}")
    from tf2dist.tools.finished.predicting import print_predictions  # imports TensorFlow

    print_predictions(line)
