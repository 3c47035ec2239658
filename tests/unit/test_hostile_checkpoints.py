"""Forged checkpoints with matching hashes: the run falls back to the checkpoint before each of them."""

import hashlib
import io
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import REPOSITORY
from tests.unit.test_saving import assert_same, facts, fail, snapshot
from tf2dist.checkpoint.facts import Facts
from tf2dist.checkpoint.snapshot import ARRAYS, FORMAT, MANIFEST, _seal
from tf2dist.checkpoint.store import Checkpoints


def reseal(path: Path, change: Callable[[dict[str, Any]], object] = lambda manifest: None) -> None:
    """Changes the manifest, and updates every hash and size."""
    manifest = json.loads((path / MANIFEST).read_text())
    manifest.pop("sha256")
    arrays = (path / ARRAYS).read_bytes()
    manifest["files"] = {ARRAYS: {"bytes": len(arrays), "sha256": hashlib.sha256(arrays).hexdigest()}}
    change(manifest)
    (path / MANIFEST).write_text(json.dumps(manifest | {"sha256": _seal(manifest)}))


def npy(array: np.ndarray, header: str | None = None) -> bytes:
    """The bytes of a .npy file, with `header` in place of its own."""
    with io.BytesIO() as file:
        np.save(file, array)
        whole = file.getvalue()
    if header is None:
        return whole
    text = header.encode() + b"\n"
    return whole[:8] + len(text).to_bytes(2, "little") + text + array.tobytes()


def replace_array(path: Path, content: bytes, compression: int = zipfile.ZIP_STORED, **described: Any) -> None:
    """Replaces the array "totals" by a file, and describes it in the manifest."""
    with zipfile.ZipFile(path / ARRAYS) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path / ARRAYS, "w") as archive:
        for name, member in (members | {"totals.npy": content}).items():
            archive.writestr(name, member, compress_type=compression if name == "totals.npy" else zipfile.ZIP_STORED)
    reseal(path, lambda manifest: manifest["arrays"]["totals"].update(described))


def a_zip_bomb(path: Path) -> None:
    zeros = np.zeros(1 << 28, np.uint8)  # 256 MB in 0.3 MB
    replace_array(path, npy(zeros), zipfile.ZIP_DEFLATED, shape=list(zeros.shape), dtype="uint8")


def a_compressed_array(path: Path) -> None:
    replace_array(path, npy(np.arange(4)), zipfile.ZIP_DEFLATED)


def more_than_there_is(path: Path) -> None:
    header = "{'descr': '<f8', 'fortran_order': False, 'shape': (1099511627776,)}"
    replace_array(path, npy(np.zeros(4), header), shape=[1 << 40], dtype="float64")


def another_shape_than_told(path: Path) -> None:
    replace_array(path, npy(np.arange(5)))


def a_wrong_checksum(path: Path) -> None:
    """The hash matches; the checksum in the zip file does not."""
    data = bytearray((path / ARRAYS).read_bytes())
    with zipfile.ZipFile(path / ARRAYS) as archive:
        at = archive.getinfo("totals.npy").header_offset
    data[data.index(np.arange(4).tobytes(), at)] ^= 1
    (path / ARRAYS).write_bytes(data)
    reseal(path)


def no_zip_file(path: Path) -> None:
    (path / ARRAYS).write_bytes(b"PK" + bytes((path / ARRAYS).stat().st_size - 2))
    reseal(path)


def words(path: Path) -> None:
    text = np.array(["abcd", "efgh"])
    replace_array(path, npy(text), shape=[2], dtype=str(text.dtype))


def objects(path: Path) -> None:
    header = "{'descr': '|O', 'fortran_order': False, 'shape': (4,)}"
    replace_array(path, npy(np.arange(4), header), dtype="object")


def deep_brackets_in_an_array(path: Path) -> None:
    replace_array(path, npy(np.arange(4), "(" * 9000))


def not_finite(path: Path) -> None:
    replace_array(path, npy(np.array([1.0, np.nan, 0.0, 0.0])), dtype="float64")


def an_array_too_many(path: Path) -> None:
    with zipfile.ZipFile(path / ARRAYS, "a") as archive:
        archive.writestr("more.npy", npy(np.arange(4)))
    reseal(path)


def the_same_name_twice(path: Path) -> None:
    with zipfile.ZipFile(path / ARRAYS, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("totals.npy", npy(np.arange(4)))
    reseal(path)


def deep_nesting(path: Path) -> None:
    (path / MANIFEST).write_text('{"format": 2, "a": ' + "[" * 100_000 + "]" * 100_000 + "}")


def a_manifest_without_end(path: Path) -> None:
    (path / MANIFEST).write_bytes(b"")
    os.truncate(path / MANIFEST, 1 << 40)


def a_manifest_of_bytes(path: Path) -> None:
    (path / MANIFEST).write_bytes(b"\xff\xfe\x00")


def a_long_number(path: Path) -> None:
    (path / MANIFEST).write_text('{"format": 2, "step": ' + "1" * 10_000 + "}")


def in_place_of(name: str, make: Callable[[Path], None]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        (path / name).unlink()
        make(path / name)

    damage.__name__ = f"{make.__name__} as {name}"
    return damage


def a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def says(change: Callable[[dict[str, Any]], object], what: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        reseal(path, change)

    damage.__name__ = what
    return damage


PARTS = ("format", "step", "arrays", "files")
DAMAGES: list[Callable[[Path], None]] = [
    a_compressed_array,
    more_than_there_is,
    another_shape_than_told,
    a_wrong_checksum,
    no_zip_file,
    words,
    objects,
    deep_brackets_in_an_array,
    not_finite,
    an_array_too_many,
    the_same_name_twice,
    deep_nesting,
    a_manifest_without_end,
    a_manifest_of_bytes,
    a_long_number,
    *(in_place_of(name, make) for name in (ARRAYS, MANIFEST) for make in (os.mkfifo, os.mkdir, a_device)),
    says(lambda manifest: manifest.pop("input"), "no input"),
    says(lambda manifest: manifest.pop("examples"), "no examples"),
    says(lambda manifest: [manifest.pop(key) for key in [*manifest] if key not in PARTS], "no facts at all"),
    says(lambda manifest: manifest.update(target_step="20"), "a word for a number"),
    says(lambda manifest: manifest.update(examples=-1), "a negative number"),
    says(lambda manifest: manifest.update(examples=1 << 63), "more than TensorFlow can count"),
    says(lambda manifest: manifest["input"].update(positions=[2]), "too few positions"),
    says(lambda manifest: manifest["input"].update(positions=[2, None]), "a position that is none"),
    says(lambda manifest: manifest["input"]["sharding"].update(num_examples=0), "no examples in a pass"),
    says(lambda manifest: manifest["input"].update(sharding="two"), "a word for the sharding"),
    says(lambda manifest: manifest["input"].update(positions=[2, True]), "a position that is true"),
    says(lambda manifest: manifest["input"].update(positions=[2, 2.0]), "a position with a point"),
    says(lambda manifest: manifest["input"]["sharding"].pop("seed"), "no seed of the sharding"),
    says(lambda manifest: manifest["input"]["sharding"].update(whole_batch_loss=1), "a number for yes or no"),
    says(lambda manifest: manifest.update(local_steps=[-1, 2]), "negative local steps"),
    says(lambda manifest: manifest.update(mode=None), "no name of the mode"),
    says(lambda manifest: manifest.update(data=["digits"]), "a list for the name of the data"),
    says(lambda manifest: manifest.update(model="dnn"), "a word for the model"),
    says(lambda manifest: manifest.update(keras=["float32"]), "a list for the settings of Keras"),
    says(lambda manifest: manifest["keras"].update(epsilon="small"), "a word for a setting of Keras"),
    says(lambda manifest: manifest.update(arrays=["totals"]), "a list for the arrays"),
    says(lambda manifest: manifest["arrays"]["totals"].update(shape=[-4]), "a negative shape"),
    says(lambda manifest: manifest["arrays"]["totals"].update(dtype=7), "a number for a type"),
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.timeout(20)
def test_a_forged_checkpoint_is_skipped(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(snapshot(1))
    damage(checkpoints.save(snapshot(2)))
    told: list[str] = []
    assert_same(Checkpoints(tmp_path).newest(told.append), snapshot(1))
    assert len(told) == 1
    assert "step-0000000002" in told[0]
    assert len(told[0]) < 1000
    later = Checkpoints(tmp_path)
    later.newest(lambda text: None)
    later.save(snapshot(2))  # as the run does when it reaches the step again
    assert_same(later.newest(fail), snapshot(2))
    later.clean()
    assert [path.name for path in later.folder.iterdir() if not path.name.startswith("step-")] == []


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda said: said.pop("examples"), "examples"),
        (lambda said: said.update(mode=None), "mode"),
        (lambda said: said["input"].pop("sharding"), "input.sharding"),
        (lambda said: said["input"]["sharding"].update(batch_size=0), "input.sharding.batch_size"),
        (lambda said: said["input"].update(positions=[2, -1]), "input.positions"),
        (lambda said: said["input"].update(positions=[2]), "input.positions"),
    ],
)
def test_a_wrong_fact_is_named(change: Callable[[dict[str, Any]], object], where: str) -> None:
    said = json.loads(json.dumps(facts(2).to_json()))
    assert Facts.of_json(said) == facts(2)
    change(said)
    with pytest.raises(ValueError, match=rf"^does not say what it must \({where}\)$"):
        Facts.of_json(said)


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


READ = """
import sys
from pathlib import Path
from tf2dist.checkpoint.store import Checkpoints
found = Checkpoints(Path(sys.argv[1])).newest(print)
peak = Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]
print(found.step, int(peak) // 1024)
"""


def test_a_zip_bomb_takes_no_memory(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(snapshot(1))
    a_zip_bomb(checkpoints.save(snapshot(2)))
    read = subprocess.run(
        [sys.executable, "-c", READ, str(tmp_path)], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    *_, last = read.stdout.splitlines()
    step, megabytes = map(int, last.split())
    assert step == 1, read
    assert megabytes < 200


def test_a_manifest_too_large_to_be_read_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tf2dist.checkpoint.snapshot.MAX_MANIFEST_BYTES", 100)
    with pytest.raises(OSError, match="would have more than 100 bytes"):
        Checkpoints(tmp_path).save(snapshot(1))
    assert FORMAT == 2
    assert list(tmp_path.iterdir()) == []
