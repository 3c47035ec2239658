"""Checkpoints are complete or invisible, verified before they are used, and reported if they are damaged."""

import contextlib
import errno
import hashlib
import io
import json
import os
import re
import resource
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tf2dist.checkpoint import store
from tf2dist.checkpoint.snapshot import (
    ARRAYS,
    MANIFEST,
    PIECE_BYTES,
    Facts,
    InputFacts,
    ShardingFacts,
    Snapshot,
    Weights,
    _seal,
    describe,
    have_same_bits,
    of_description,
    pack,
    unpack,
)
from tf2dist.checkpoint.store import Checkpoints
from tf2dist.config.load import DEFAULTS
from tf2dist.errors import CheckpointError, TaskLostError


def facts(step: int) -> Facts:
    """The facts of a run with two workers."""
    return Facts(
        mode="sync",
        local_steps=(step, step),
        target_step=20,
        examples=10 * step,
        input=InputFacts(ShardingFacts(1257, 5, 2, seed=0, whole_batch_loss=True, shuffle=True), 10 * step, ((0, 5),)),
        data="digits",
        model={"name": "dnn", "hidden_units": [300, 50]},
        optimizer={"name": "sgd", "learning_rate": 0.01, "clipnorm": None},
        seed=0,
        keras=DEFAULTS,
    )


# The facts of `facts(3)` in a file, in every version.
IN_THE_FILE = (
    '"mode": "sync", "local_steps": [3, 3], "target_step": 20, "examples": 30, '
    '"input": {"sharding": {"num_examples": 1257, "batch_size": 5, "num_shards": 2, "seed": 0, '
    '"whole_batch_loss": true, "shuffle": true}, "position": 30, "unseen": [[0, 5]], "positions": []}, '
    '"data": "digits", '
    '"model": {"name": "dnn", "hidden_units": [300, 50]}, '
    '"optimizer": {"name": "sgd", "learning_rate": 0.01, "clipnorm": null}, "seed": 0, '
    '"keras": {"floatx": "float32", "image_data_format": "channels_last", "epsilon": 1e-07}'
)


def snapshot(step: int) -> Snapshot:
    arrays: dict[str, np.ndarray] = {
        "model/hidden1/kernel": np.full((3, 2), step, np.float32),
        "optimizer/hidden1_kernel_momentum": np.array([step, -1], np.float64),
        "totals": np.arange(4),
    }
    return Snapshot(step, arrays, facts(step))


def assert_same(found: Snapshot | None, expected: Snapshot) -> None:
    assert found
    assert (found.step, found.arrays.keys()) == (expected.step, expected.arrays.keys())
    assert found.facts == expected.facts
    for name, array in expected.arrays.items():
        np.testing.assert_array_equal(found.arrays[name], array)
        assert found.arrays[name].dtype == array.dtype


def fail(text: str) -> None:
    pytest.fail(f"nothing is damaged, but: {text}")


def test_the_newest_saved_snapshot_is_found(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=3)
    assert checkpoints.newest(fail) is None
    for step in (5, 9, 10, 100, 99_999_999_999):
        checkpoints.save(snapshot(step))
        assert_same(checkpoints.newest(fail), snapshot(step))
    assert [path.name for path in checkpoints.paths()] == ["step-0000000010", "step-0000000100", "step-99999999999"]
    assert [path.stat().st_mode & 0o077 for path in checkpoints.folder.iterdir()] == [0, 0, 0], (
        "others may read the files"
    )


def test_a_checkpoint_is_hashed_while_the_disk_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_hashed, own, digest, fsync = threading.Event(), threading.get_ident(), hashlib.file_digest, os.fsync

    def noted(*arguments: Any) -> Any:
        is_hashed.set()
        return digest(*arguments)

    def slow(descriptor: int) -> None:
        assert is_hashed.wait(10)
        assert threading.get_ident() == own, "`Saver.wait` looks at the processor time of this thread"
        fsync(descriptor)

    monkeypatch.setattr(hashlib, "file_digest", noted)
    monkeypatch.setattr(os, "fsync", slow)
    Checkpoints(tmp_path).save(snapshot(3))


def test_a_snapshot_is_unchanged_after_it_was_sent() -> None:
    result = of_description(*unpack(pack(describe(snapshot(7)), snapshot(7).arrays)))
    assert isinstance(result, Snapshot)
    assert_same(result, snapshot(7))
    assert json.dumps(describe(snapshot(3))) == f"[3, {{{IN_THE_FILE}}}]"


def test_weights_are_unchanged_after_they_were_sent() -> None:
    weights = snapshot(7).weights()
    assert describe(weights) == [0, {}]
    result = of_description(*unpack(pack(describe(weights), weights.arrays)))
    assert isinstance(result, Weights)
    assert result.arrays.keys() == {"model/hidden1/kernel"}
    np.testing.assert_array_equal(result.arrays["model/hidden1/kernel"], snapshot(7).arrays["model/hidden1/kernel"])


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def replace_in(old: str, new: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    return damage


def becomes(text: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.write_text(text)

    return damage


def in_its_place(make: Callable[[Path], None]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


DAMAGES: list[tuple[str, Callable[[Path], object]]] = [
    (ARRAYS, truncate),
    (ARRAYS, flip_a_bit),
    (ARRAYS, empty),
    (ARRAYS, Path.unlink),
    (MANIFEST, truncate),
    (MANIFEST, empty),
    (MANIFEST, Path.unlink),
    (MANIFEST, becomes("[]")),
    (MANIFEST, becomes('{"format": 2}')),
    (MANIFEST, replace_in('"step": 2', '"step": 3')),
    (MANIFEST, replace_in("model/hidden1", "model/hidden9")),
    (MANIFEST, becomes('{"format": 99, "step": 2}')),
    (MANIFEST, lambda path: path.write_bytes(b"\xff\xfe\x00")),
    *((name, in_its_place(make)) for name in (ARRAYS, MANIFEST) for make in (os.mkfifo, os.mkdir)),
]


@pytest.mark.parametrize(("file", "damage"), DAMAGES)
def test_a_damaged_checkpoint_is_replaced_by_the_one_before_it(
    tmp_path: Path, file: str, damage: Callable[[Path], object]
) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(snapshot(1))
    damage(checkpoints.save(snapshot(2)) / file)
    messages: list[str] = []
    assert_same(checkpoints.newest(messages.append), snapshot(1))
    assert len(messages) == 1
    assert "step-0000000002" in messages[0]
    assert "going back" in messages[0]
    checkpoints.save(snapshot(2))  # as a run does when it reaches the step again
    assert_same(checkpoints.newest(fail), snapshot(2))


def reseal(path: Path, change: Callable[[dict[str, Any]], object] = lambda manifest: None) -> None:
    """Changes the manifest, and updates every hash and size, as another version or a person could have written it."""
    manifest = json.loads((path / MANIFEST).read_text())
    manifest.pop("sha256")
    arrays = (path / ARRAYS).read_bytes()
    manifest["files"] = {ARRAYS: {"bytes": len(arrays), "sha256": hashlib.sha256(arrays).hexdigest()}}
    change(manifest)
    (path / MANIFEST).write_text(json.dumps(manifest | {"sha256": _seal(manifest)}))


def not_finite(path: Path) -> None:
    with io.BytesIO() as file:
        np.savez(file, **(snapshot(2).arrays | {"model/hidden1/kernel": np.array([1.0, np.nan])}))  # type: ignore[arg-type]
        (path / ARRAYS).write_bytes(file.getvalue())
    reseal(path)


class Trap:
    def __reduce__(self) -> Any:
        return pytest.fail, ("unpickled",)


def pickled(path: Path) -> None:
    """As in a run directory from somebody else: loading it would execute what they want."""
    with io.BytesIO() as file:
        np.savez(file, **(snapshot(2).arrays | {"totals": np.array([Trap()])}))  # type: ignore[arg-type]
        (path / ARRAYS).write_bytes(file.getvalue())
    reseal(path)


UNUSABLE: dict[str, tuple[Callable[[Path], None], str]] = {
    "not finite": (not_finite, "model/hidden1/kernel is not finite"),
    "pickled": (pickled, "allow_pickle=False"),
    "no facts": (lambda path: reseal(path, lambda manifest: manifest.pop("input")), "(input)"),
    "another array": (
        lambda path: reseal(path, lambda manifest: manifest["arrays"].pop("totals")),
        "does not hold the arrays of the manifest",
    ),
}


@pytest.mark.parametrize("what", UNUSABLE)
def test_an_undamaged_checkpoint_that_cannot_be_used_is_replaced_too(tmp_path: Path, what: str) -> None:
    change, reason = UNUSABLE[what]
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(snapshot(1))
    change(checkpoints.save(snapshot(2)))
    messages: list[str] = []
    assert_same(checkpoints.newest(messages.append), snapshot(1))
    assert len(messages) == 1
    assert reason in messages[0]


def test_a_metric_may_be_no_number(tmp_path: Path) -> None:
    """The sum of a metric is saved in the middle of an epoch of `fit`; Keras goes on with such a metric, too."""
    checkpoints = Checkpoints(tmp_path)
    saved = replace(snapshot(1), arrays=snapshot(1).arrays | {"epoch/metrics": np.array([1.0, np.nan])})
    checkpoints.save(saved)
    assert_same(checkpoints.newest(fail), saved)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda fields: fields.pop("examples"), "examples"),
        (lambda fields: fields.update(mode=None), "mode"),
        (lambda fields: fields.update(examples=1 << 63), "examples"),
        (lambda fields: fields["input"].pop("sharding"), "input.sharding"),
        (lambda fields: fields["input"]["sharding"].update(batch_size=0), "input.sharding.batch_size"),
        (lambda fields: fields["input"].update(positions=[2, -1]), "input.positions"),
        (lambda fields: fields["input"].update(positions=[2]), "input.positions"),
        (lambda fields: fields["input"].update(position=None), "input.positions"),
        (lambda fields: fields["input"].update(unseen=[[1, 2, 3]]), "input.unseen"),
        (lambda fields: fields["keras"].update(epsilon="small"), "keras.epsilon"),
    ],
)
def test_a_wrong_fact_is_named(change: Callable[[dict[str, Any]], object], where: str) -> None:
    fields = json.loads(json.dumps(facts(2).to_json()))
    assert Facts.of_json(fields) == facts(2)
    change(fields)
    with pytest.raises(ValueError, match=rf"^does not say what it must \({where}\)$"):
        Facts.of_json(fields)


def test_the_facts_of_earlier_versions_have_a_position_of_each_worker() -> None:
    fields = json.loads(json.dumps(facts(2).to_json()))
    fields["input"] = {"sharding": fields["input"]["sharding"], "positions": [2, 2]}
    assert Facts.of_json(fields).input == InputFacts(facts(2).input.sharding, positions=(2, 2))


def test_unknown_fields_are_ignored(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)

    def add(manifest: dict[str, Any]) -> None:
        for section in (manifest, manifest["input"], manifest["input"]["sharding"], manifest["keras"]):
            section["more"] = ["of a later version"]

    reseal(checkpoints.save(snapshot(1)), add)
    assert_same(Checkpoints(tmp_path).newest(fail), snapshot(1))


@pytest.mark.parametrize("make", [os.mkfifo, Path.touch, Path.mkdir, lambda path: path.symlink_to("loop")])
def test_a_file_with_the_name_of_a_checkpoint_is_skipped(tmp_path: Path, make: Callable[[Path], None]) -> None:
    Checkpoints(tmp_path).save(snapshot(1))
    make(tmp_path / "step-0000000002")
    checkpoints = Checkpoints(tmp_path)
    assert_same(checkpoints.newest(lambda text: None), snapshot(1))
    checkpoints.save(snapshot(2))
    assert_same(checkpoints.newest(fail), snapshot(2))


def test_a_run_with_only_damaged_checkpoints_does_not_start_over(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        truncate(checkpoints.save(snapshot(step)) / ARRAYS)
    with pytest.raises(CheckpointError, match=r"all 2 checkpoints are damaged.*start over"):
        checkpoints.newest(lambda text: None)


@contextlib.contextmanager
def no_more_open_files() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_checkpoint_that_cannot_be_read_now_is_not_damaged(tmp_path: Path) -> None:
    """A run that went back, or started over, would lose what was trained."""
    for step in (1, 2, 3):
        Checkpoints(tmp_path).save(snapshot(step))
    checkpoints = Checkpoints(tmp_path, keep=1)
    paths = checkpoints.paths()
    checkpoints.paths = lambda: paths  # type: ignore[method-assign]
    with no_more_open_files(), pytest.raises(TaskLostError) as told:
        checkpoints.newest(fail)
    message = r"cannot be read \(Too many open files\); try again, and if that does not help, move it away"
    assert re.fullmatch(f"{tmp_path}/step-0000000003: {message}", str(told.value))
    with no_more_open_files(), pytest.raises(OSError, match="Too many open files"):
        checkpoints._drop_oldest()
    assert_same(checkpoints.newest(fail), snapshot(3))


def test_the_manifest_describes_the_checkpoint(tmp_path: Path) -> None:
    manifest = json.loads((Checkpoints(tmp_path).save(snapshot(3)) / MANIFEST).read_text())
    assert manifest["step"] == 3
    assert manifest["arrays"]["model/hidden1/kernel"] == {"shape": [3, 2], "dtype": "float32"}
    assert manifest["files"][ARRAYS].keys() == {"bytes", "sha256"}
    text = json.dumps(manifest)
    assert text.startswith(f'{{"format": 2, "step": 3, {IN_THE_FILE}, "arrays": {{')


def test_saving_the_same_step_again_changes_nothing(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    before = checkpoints.save(snapshot(3)).stat().st_ino
    assert checkpoints.save(snapshot(3)).stat().st_ino == before


def test_a_run_that_ends_at_another_step_than_planned_is_saved_again(tmp_path: Path) -> None:
    """As when it was stopped, and is resumed with fewer steps: an evaluator would wait for the planned end."""
    checkpoints, saved = Checkpoints(tmp_path), snapshot(3)
    checkpoints.save(saved)
    shorter = replace(saved, facts=replace(saved.facts, target_step=3))
    Checkpoints(tmp_path).save(shorter)
    assert_same(checkpoints.newest(fail), shorter)


class Killed(BaseException):
    """Stands for a kill: nothing of the process happens after it."""


@pytest.mark.parametrize("renames", [0, 1, 2])
@pytest.mark.parametrize("ends_by", [Killed(), OSError(errno.EIO, "Input/output error")])
def test_a_checkpoint_is_not_lost_while_it_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int, ends_by: BaseException
) -> None:
    """It is one of the two, whichever rename is the last one that the process has made."""
    Checkpoints(tmp_path).save(snapshot(2))
    newer = replace(snapshot(2), arrays=snapshot(2).arrays | {"totals": np.arange(5)})
    rename, calls = Path.rename, count()

    def failing(path: Path, target: Path) -> Path:
        if next(calls) == renames:
            raise ends_by
        return rename(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", failing)
        if isinstance(ends_by, Killed):
            patched.setattr(store, "_discard", lambda path: None)
        with contextlib.suppress(Killed, OSError):
            Checkpoints(tmp_path).save(newer, replaces=True)
    again = Checkpoints(tmp_path)
    if isinstance(ends_by, Killed):
        again.clean()
    assert_same(again.newest(fail), newer if renames == 2 else snapshot(2))
    again.save(newer, replaces=True)
    assert_same(again.newest(fail), newer)
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000000002"]


def test_a_later_process_does_not_count_damaged_checkpoints(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        Checkpoints(tmp_path).save(snapshot(step))
    truncate(tmp_path / "step-0000000002" / ARRAYS)
    checkpoints = Checkpoints(tmp_path, keep=3)
    assert_same(checkpoints.newest(fail), snapshot(3))
    checkpoints.save(snapshot(4))
    assert [path.name[-1] for path in checkpoints.paths()] == ["1", "2", "3", "4"]


@pytest.mark.parametrize(("keep", "left"), [(1, [5]), (2, [2, 3, 4, 5]), (3, [1, 2, 3, 4, 5])])
def test_damaged_checkpoints_do_not_count_as_kept(tmp_path: Path, keep: int, left: list[int]) -> None:
    """A run that fell back to an older checkpoint saves steps before the damaged ones; these must be kept."""
    for step in (1, 3, 4):
        Checkpoints(tmp_path).save(snapshot(step))
    for step in (3, 4):
        truncate(tmp_path / f"step-{step:010}" / ARRAYS)
    checkpoints = Checkpoints(tmp_path, keep)
    assert_same(checkpoints.newest(lambda text: None), snapshot(1))
    checkpoints.save(snapshot(2))
    assert_same(checkpoints.newest(lambda text: None), snapshot(2))
    checkpoints.save(snapshot(5))
    assert [path.name for path in checkpoints.paths()] == [f"step-{step:010}" for step in left]


def test_arrays_are_compared_by_their_bits_and_in_little_memory() -> None:
    large = np.zeros(4 * PIECE_BYTES // 4 + 1, np.float32)
    other = large.copy()
    tracemalloc.start()
    try:
        assert have_same_bits(large, other)
        assert tracemalloc.get_traced_memory()[1] < 1.5 * PIECE_BYTES
    finally:
        tracemalloc.stop()
    other[-1] = -0.0
    assert not have_same_bits(large, other)
    nan = np.array([[np.nan, 1.0], [2.0, 3.0]], np.float32)
    assert have_same_bits(nan, np.asfortranarray(nan))
    assert not have_same_bits(nan, nan[:1])
    assert not have_same_bits(nan, nan.astype(np.float64))
    assert not have_same_bits(nan, nan.view(np.int32))
    assert have_same_bits(np.array(7), np.array(7))


def test_large_arrays_stay_in_the_file(tmp_path: Path) -> None:
    """They are checked and used piece by piece; a number that is not finite is found in the last piece, too."""
    large = np.arange(PIECE_BYTES // 4 * 2 + 14, dtype=np.float32).reshape(-1, 2)
    arrays = snapshot(1).arrays | {"model/large": large, "model/turned": np.asfortranarray(large[:, ::-1])}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(replace(snapshot(1), arrays=arrays))
    found = checkpoints.newest(fail)
    assert found
    assert [name for name, array in found.arrays.items() if isinstance(array, np.memmap)] == [*arrays][-2:]
    # Written from the file in which they lie, as when a run goes on.
    checkpoints.save(replace(found, step=2, facts=facts(2)))
    assert_same(checkpoints.newest(fail), Snapshot(2, arrays, facts(2)))

    large[-1, -1] = np.nan
    checkpoints.save(Snapshot(3, arrays, facts(3)))
    messages: list[str] = []
    assert_same(checkpoints.newest(messages.append), Snapshot(2, found.arrays, facts(2)))
    assert "model/large is not finite" in messages[0]
