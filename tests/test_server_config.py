"""The server's configuration: what is wrong is said, with advice."""

from __future__ import annotations

import argparse
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from heliograph_proto.errors import ConfigurationError
from heliograph_proto.limits import Limits
from heliograph_server.config import (
    ServerConfig,
    add_serve_arguments,
    config_from_arguments,
    load_config,
)


def write(folder: Path, text: str) -> Path:
    path = folder / "server.toml"
    path.write_text(text)
    return path


def from_command_line(*words: str) -> ServerConfig:
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    return config_from_arguments(parser.parse_args(words))


def test_the_defaults_listen_on_loopback_alone() -> None:
    config = load_config()
    assert config == ServerConfig()
    assert all(address.is_loopback for address in config.addresses)


def test_a_file_sets_every_field(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        listen = ["grpc://0.0.0.0:1", "unix:///tmp/x"]
        insecure = true
        backends = ["a_module", "/plugins/"]
        devices = ["cpu:threads=2"]
        drain_seconds = 5
        log_level = "debug"
        [limits]
        tensors = 7
        """,
    )
    config = load_config(path)
    assert config.listen == ("grpc://0.0.0.0:1", "unix:///tmp/x")
    assert (config.insecure, config.devices, config.drain_seconds) == (True, ("cpu:threads=2",), 5.0)
    assert (config.log_level, config.limits.tensors) == ("debug", 7)
    assert config.backends == ("a_module", "/plugins")


def test_paths_of_plugins_begin_at_the_file_that_names_them(tmp_path: Path) -> None:
    path = write(tmp_path, 'backends = ["one.py", "./two/", "../three.py", "four.five", "/six.py"]')
    here = str(tmp_path)
    assert load_config(path).backends == (
        f"{here}/one.py",
        f"{here}/two",
        f"{here}/../three.py",
        "four.five",
        "/six.py",
    )
    assert from_command_line("--config", str(path), "--backend", "one.py").backends == ("one.py",)


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, 'drain_seconds = 5\nlog_level = "debug"')
    config = from_command_line("--config", str(path), "--drain-seconds", "1", "--listen", "127.0.0.1:0")
    assert (config.drain_seconds, config.log_level, config.listen) == (1.0, "debug", ("127.0.0.1:0",))


def test_listen_backend_and_device_can_be_repeated() -> None:
    words = ("--listen", "unix:///a", "--listen", "127.0.0.1:1", "--device", "cpu", "--device", "fake")
    config = from_command_line(*words, "--backend", "./a.py", "--backend", "b.c")
    assert config.listen == ("unix:///a", "127.0.0.1:1") and config.devices == ("cpu", "fake")
    assert config.backends == ("./a.py", "b.c")


def test_there_is_a_cpu_and_no_plugin_unless_somebody_says_otherwise() -> None:
    assert (from_command_line().devices, from_command_line().backends) == (("cpu",), ())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("drain_secnods = 5", "did you mean 'drain_seconds'?"),
        ("[limits]\ntensor = 5", "did you mean 'tensors'?"),
        ("[limits]\ntensors = 0", "1 to"),
        ("[limits]\ntensors = true", "1 to"),
        ("[limits]\ntensors = 99999999999", "1 to"),
        ("limits = 3", "[limits]"),
        ("drain_seconds = 'long'", "a number"),
        ("drain_seconds = -1", "0 to"),
        ("drain_seconds = nan", "0 to"),
        ("insecure = 1", "true or false"),
        ("listen = '127.0.0.1:1'", "a list"),
        ("listen = []", "at least one"),
        ("listen = [3]", "a list"),
        ("devices = []", "at least one"),
        ("backends = './plugins/'", "a list"),
        ("backend = []", "did you mean 'backends'?"),
        ("listen = ['ftp://x']", "unknown scheme"),
        ("listen = ['local:']", "cannot listen"),
        ("listen = ['127.0.0.1:1#cpu0']", "without a device"),
        ("listen = ['0.0.0.0:1']", "--insecure"),
        ("listen = ['example.org:1']", "--insecure"),
        ("log_level = 'inof'", "did you mean 'info'?"),
        ("listen = [", "no TOML"),
    ],
)
def test_what_is_wrong_is_said_with_advice(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_config(write(tmp_path, text))
    assert said in str(caught.value)


def test_a_missing_file_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot read"):
        load_config(tmp_path / "none.toml")


EXAMPLE = Path(__file__).parents[1] / "deploy" / "heliograph.toml"


def test_the_example_has_every_setting_with_its_default() -> None:
    assert load_config(EXAMPLE) == ServerConfig()
    table = tomllib.loads(EXAMPLE.read_text())
    assert set(table) == {field.name for field in fields(ServerConfig)}
    assert set(table["limits"]) == {field.name for field in fields(Limits)}


def test_the_example_explains_every_setting() -> None:
    paragraphs = EXAMPLE.read_text().split("\n\n")
    assert all(paragraph.startswith("#") for paragraph in paragraphs)
