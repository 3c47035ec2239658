"""Failures as the user reads them."""

from pathlib import Path

import keras
import pytest

from tf2dist.errors import (
    ConfigError,
    FailureRecord,
    Interrupted,
    LeaderLostError,
    NotFiniteError,
    TaskFailure,
    TaskLeft,
    TaskLostError,
    kind_of,
    reason_of,
    users_location,
)


def test_exit_codes() -> None:
    found = [error.exit_code for error in (ConfigError, NotFiniteError, TaskLostError, LeaderLostError, TaskLeft)]
    assert found == [2, 3, 138, 139, 143]
    assert [Interrupted(number).exit_code for number in (2, 15)] == [130, 143]


def test_a_record_survives_its_process(tmp_path: Path) -> None:
    try:
        raise ValueError("wrong shape\nmore")
    except ValueError as error:
        record = FailureRecord.of("worker-1", error)
    record.path(tmp_path, record.task).write_text(record.as_json())
    assert FailureRecord.read(tmp_path, "worker-1") == record
    assert FailureRecord.read(tmp_path, "worker-2") is None
    assert record.message == f"ValueError: wrong shape more ({__file__}:31)"
    assert "test_errors.py" in record.details
    assert record.exit_code == 1


@pytest.mark.parametrize(
    ("text", "reason", "place"),
    [
        ("first words\nof a sentence\n\nmore", "first words of a sentence", ""),
        (
            "Exception encountered when calling D.call().\n\n\x1b[1mno shape\x1b[0m\n\nArguments received",
            "no shape",
            "",
        ),
        (
            'in user code:\n\n    File "/my/own.py", line 7, in g  *\n        f(x)\n'
            f'    File "{keras.__file__}", line 9, in f\n        raise\n\n    ValueError: wrong\n    shape\n',
            "wrong shape",
            " (/my/own.py:7)",
        ),
        ("KeyError: 'gone'\nTraceback (most recent call last):\n\n  File ...", "KeyError: 'gone'", ""),
        ("", "ValueError", ""),
    ],
    ids=["paragraph", "keras", "traced", "called", "nothing"],
)
def test_the_reason_and_the_place_in_the_users_code(text: str, reason: str, place: str) -> None:
    error = ValueError(text)
    assert (reason_of(error), users_location(error)) == (reason, place)


def test_known_errors_need_no_traceback() -> None:
    record = FailureRecord.of("worker-1", ConfigError("train.steps (0): must be at least 1"))
    assert (record.exit_code, record.details) == (2, "")


def test_the_first_failure_is_told_whole_and_the_others_in_a_line() -> None:
    records = [
        FailureRecord("worker-1", 1.0, 1, "ValueError: wrong", "Traceback ..."),
        FailureRecord("chief-0", 2.0, 138, "UnavailableError: gone", "Traceback of the echo"),
    ]
    failure = TaskFailure(records)
    assert str(failure).splitlines() == [
        "Traceback ...",
        "worker-1: ValueError: wrong",
        "  then chief-0: UnavailableError: gone",
    ]
    assert failure.exit_code == 1


def test_what_a_value_is() -> None:
    values = [
        None,
        1,
        (),
        {},
        object(),
        Path(),
        type("ndarray", (), {})(),
        type("SGD", (), {})(),
        type("uint8", (), {})(),
    ]
    assert [kind_of(value) for value in values] == [
        *("None", "an int", "a tuple", "a dict", "an object", f"a {type(Path()).__name__}"),
        *("an ndarray", "an SGD", "a uint8"),
    ]
