"""Outputs are compared as docs/development.md says."""

import pytest

from tests.shown import is_as_shown

RUN = """\
starting chief-0, ps-0, worker-0
step 3/2,760  loss 2.2744
...
async dnn on mnist: 3 workers, 2,760 steps at 377/s (37,574 examples/s), staleness 1.72 (at most 54)
test accuracy 0.9776, loss 0.0720 over 10,000 examples
/home/me/outputs/20261124_140512-async
"""
OTHER_RUN = """\
starting chief-0, ps-0, worker-0
step 12/2,760  loss 1.9

step 1,596/2,760  loss 0.0844  311 steps/s  0:04 left
async dnn on mnist: 3 workers, 2,760 steps at 1,412/s (9 examples/s), staleness 0.5 (at most 7)
test accuracy 0.9612, loss 0.1102 over 10,000 examples
/home/me/outputs/20270101_000000-async
"""
TABLE = """\
job  mode   test accuracy    loss  steps/s  wall secs  state
...
  0  async         0.9694  0.1076      242       17.1  done
"""
WRONG = {
    "another count": (RUN, OTHER_RUN.replace("10,000", "9,999")),
    "another accuracy": (RUN, OTHER_RUN.replace("0.9612", "0.9112")),
    "a far better accuracy": (RUN, OTHER_RUN.replace("0.9612", "0.9912")),
    "another loss": (RUN, OTHER_RUN.replace("0.1102", "0.2202")),
    "another epoch": ("epoch 1/5: loss 1.5\n", "epoch 2/5: loss 1.5\n"),
    "another target": (RUN, OTHER_RUN.replace("12/2,760", "12/2,761")),
    "another word": (RUN, OTHER_RUN.replace("chief", "coordinator")),
    "another number in a name": (RUN, OTHER_RUN.replace("ps-0", "ps-1")),
    "a line more": (RUN, OTHER_RUN + "done\n"),
    "a line less": (RUN, OTHER_RUN.partition("/home")[0]),
    "nothing": (RUN, ""),
    "something": ("", "done\n"),
    "another accuracy in a table": (TABLE, TABLE.replace("0.9694", "0.9094")),
    "another job in a table": (TABLE, TABLE.replace("  0  async", "  1  async")),
    "a cell less": (TABLE, TABLE.replace("  done", "")),
}
RIGHT = {
    "another run": (RUN, OTHER_RUN),
    "a line of a log": (
        "epoch=3, global_step=311, loss=0.35, final accuracy=0.9767\n",
        "epoch=0, global_step=7, loss=0.9, final accuracy=0.96",
    ),
    "another time": ("done in 1:01 with an accuracy of 0.9526\n", "done in 0:04 with an accuracy of 0.96\n"),
    "nothing": ("", "\n"),
    "anything": ("...\n", "one\ntwo\n"),
    "anything, and then a line": ("...\nlast\n", "first\nlast\nlast\n"),
    "anything in a line": ("With equal workers, ... is first.\n", "With equal workers, sync is first.\n"),
    "a line of a slow machine": (RUN, OTHER_RUN + "drawing training.png\n"),
    "other times in a table": (TABLE, TABLE.replace(" 242 ", " 7 ").replace("17.1", "80.2").replace("0.1076", "0.2")),
    "another width of a column": (TABLE, TABLE.replace("  0  async ", "  0   async ")),
}


@pytest.mark.parametrize("name", RIGHT)
def test_it_is_as_shown(name: str) -> None:
    assert is_as_shown(*RIGHT[name])


@pytest.mark.parametrize("name", WRONG)
def test_it_is_not_as_shown(name: str) -> None:
    assert not is_as_shown(*WRONG[name])
