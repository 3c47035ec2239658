"""The settings in keras.json become options; those that are invalid are refused by name."""

import json
import os
from pathlib import Path

import pytest

from tf2dist.cluster.spec import Cluster
from tf2dist.config import load as loading
from tf2dist.config.load import load
from tf2dist.config.schema import KerasConfig
from tf2dist.errors import ConfigError
from tf2dist.hosts.identity import differences, explain, identity_of


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path at which Keras reads its settings."""
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    return tmp_path / "keras.json"


def keras_of(*options: str) -> KerasConfig:
    return load(["data=digits", "mode=sync", *options], None).keras


def test_without_a_file_the_defaults_are_those_of_keras(file: Path) -> None:
    assert keras_of() == loading.DEFAULTS
    assert loading.notes(keras_of()) == []


def test_an_option_overrides_the_file(file: Path) -> None:
    file.write_text(json.dumps({"image_data_format": "channels_first", "epsilon": 1e-3, "nnx_enabled": True}))
    settings = keras_of()
    assert settings == KerasConfig(floatx="float32", image_data_format="channels_first", epsilon=1e-3)
    assert loading.notes(settings) == [
        f"keras.image_data_format is channels_first, as in {file}",
        f"keras.epsilon is 0.001, as in {file}",
    ]
    assert keras_of("keras.image_data_format=channels_last", "keras.epsilon=1e-5") == KerasConfig(
        floatx="float32", image_data_format="channels_last", epsilon=1e-5
    )


def test_a_file_that_keras_ignores_is_ignored(file: Path) -> None:
    file.write_text('{"floatx": ')
    assert keras_of() == loading.DEFAULTS


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"floatx": "float64"}', "keras.floatx (float64, as in {file}): must be float32"),
        ('{"image_data_format": "last"}', "keras.image_data_format (last, as in {file}): must be channels_last or"),
        ('{"epsilon": 1}', "keras.json ({file}): epsilon (1) must be a number with a point"),
        ('{"epsilon": NaN}', "keras.epsilon (nan, as in {file}): must be more than 0"),
        ('{"floatx": []}', "keras.json ({file}): floatx ([]) must be a word"),
        ("[]", "keras.json ({file}): is not a JSON object"),
        ("[" * 100_000, "keras.json ({file}): cannot be read"),
    ],
)
def test_an_invalid_setting_is_refused(file: Path, text: str, words: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        keras_of()
    assert words.replace("{file}", str(file)) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_pipe_is_refused_without_waiting(file: Path) -> None:
    os.mkfifo(file)
    with pytest.raises(ConfigError, match="is not a regular file"):
        keras_of()


def test_an_unsupported_option_is_refused(file: Path) -> None:
    for option, words in (
        ("keras.floatx=float16", r"keras\.floatx \(float16\): must be float32"),
        ("keras.image_data_format=first", r"keras\.image_data_format \(first\)"),
        ("keras.epsilon=0", r"keras\.epsilon \(0\.0\)"),
        ("keras.backend=jax", r"keras\.backend: there is no such option"),
    ):
        with pytest.raises(ConfigError, match=words):
            keras_of(option)


def test_hosts_compare_their_settings(file: Path) -> None:
    cluster = Cluster("sync", {"worker": ("a:1", "b:1")})
    identities = []
    for value in ("channels_last", "channels_first"):
        file.write_text(json.dumps({"image_data_format": value}))
        identities.append(identity_of(load(["data=digits", "mode=sync"], None), cluster))
    assert explain(differences(*identities), "at worker-0", "here") == (
        "keras.image_data_format: channels_last at worker-0, channels_first here"
    )
