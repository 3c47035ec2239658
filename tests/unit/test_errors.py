"""Failures as the user reads them."""

from pathlib import Path

from tf2dist.errors import ConfigError, FailureRecord, Interrupted, NotFiniteError, TaskFailure, TaskLostError


def test_exit_codes() -> None:
    assert [error.exit_code for error in (ConfigError, NotFiniteError, TaskLostError)] == [2, 3, 138]
    assert [Interrupted(number).exit_code for number in (2, 15)] == [130, 143]


def test_a_record_survives_its_process(tmp_path: Path) -> None:
    try:
        raise ValueError("wrong shape\nmore")
    except ValueError as error:
        record = FailureRecord.of("worker-1", error)
    record.write(tmp_path)
    assert FailureRecord.read(tmp_path, "worker-1") == record
    assert FailureRecord.read(tmp_path, "worker-2") is None
    assert record.message == "ValueError: wrong shape"
    assert "test_errors.py" in record.details
    assert record.exit_code == 1


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
