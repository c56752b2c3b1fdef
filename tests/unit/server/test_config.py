"""The server's configuration: what is wrong is said, with advice."""

from __future__ import annotations

import argparse
import json
import re
import socket
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from paths import DEPLOY, ROOT

from heliograph.cli import main
from heliograph_proto.errors import ConfigurationError
from heliograph_proto.sessions import Limits, Quota
from heliograph_server.config.config import (
    OTHER_VARIABLES,
    ServerConfig,
    add_serve_arguments,
    as_file,
    config_from_arguments,
    load_config,
)
from heliograph_server.config.schema import SettingEntry, entries
from heliograph_server.config.sources import OF_A_SERVICE


def write(folder: Path, text: str) -> Path:
    path = folder / "server.toml"
    path.write_text(text)
    return path


def from_command_line(*words: str, **variables: str) -> ServerConfig:
    """What these words ask for, with variables HELIOGRAPH_NAME in the environment."""
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    environment = {"PATH": "/bin"} | {f"HELIOGRAPH_{name}": text for name, text in variables.items()}
    return config_from_arguments(parser.parse_args(words), environment)


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


def test_the_state_is_in_a_folder_beside_the_file_or_in_another_daemon(tmp_path: Path) -> None:
    folder = load_config(write(tmp_path, 'state = "kept"'))
    assert folder.state == str(tmp_path / "kept") and folder.state_elsewhere is None
    url = "grpcs://keeper.example:7071/my%20name?tls_name=other.example"
    found = load_config(write(tmp_path, f'state = "{url}"')).state_elsewhere
    assert found is not None and found.name == "my name"
    assert str(found.address) == "grpcs://keeper.example:7071?tls_name=other.example"
    # Two daemons of a host have other names, and a restarted one has the same.
    listening = 'listen = ["grpc://127.0.0.1:7077"]\n'
    places = [
        load_config(write(tmp_path, f'{listening}state = "{one}"')).state_elsewhere
        for one in ("grpc://10.0.0.2", "grpc://10.0.0.2:7070/", "unix:///run/keeper.sock")
    ]
    assert {one.name for one in places if one is not None} == {f"{socket.gethostname()}:7077"}
    assert [str(one.address) for one in places if one is not None] == [
        "grpc://10.0.0.2:7070", "grpc://10.0.0.2:7070", "unix:///run/keeper.sock",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("grpc://10.0.0.2/a?token=hgt_secret", "--pool-token FILE"),
        ("grpcs://10.0.0.2/a?pin=" + "0" * 64, "--pool-ca FILE"),
        ("grpc://10.0.0.2/a#cpu0", "for clients"),
        ("grpc://10.0.0.2:port/a", "port"),
        ("grpc://10.0.0.2/" + "a" * 256, "too long"),
        ("grpc://10.0.0.2/a%0a", "not printable"),
        ("grcp://10.0.0.2/a?token=hgt_secret", "no URL of a daemon"),
        ("https://10.0.0.2/a", "no URL of a daemon"),
        ("grpc:/10.0.0.2/a", "no URL of a daemon"),
        ("GRPCS:10.0.0.2:7070", "no URL of a daemon"),
    ],
)
def test_a_state_elsewhere_that_is_wrong_is_said_with_advice(tmp_path: Path, state: str, said: str) -> None:
    for path, above in ((None, {"state": state}), (write(tmp_path, f'state = "{state}"'), {})):
        with pytest.raises(ConfigurationError) as caught:
            load_config(path, above=above)
        assert said in str(caught.value) and "secret" not in str(caught.value) and caught.value.advice


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
        ("listen = [", "not TOML"),
        (f"drain_seconds = 1{'0' * 400}", "0 to"),
        (f"drain_seconds = 1{'0' * 5000}", "not TOML"),
        (f"listen = {'[' * 5000}", "not TOML"),
        ("[quota]\nweight = 0", "a number, 0.001 to 1000"),
        ("[quota]\ndevice_memory_bytes = '1GB'", "quota.device_memory_bytes is '1GB'"),
    ],
)
def test_what_is_wrong_is_said_with_advice(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_config(write(tmp_path, text))
    assert said in str(caught.value)


def test_a_missing_file_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot read"):
        load_config(tmp_path / "none.toml")


#: What some settings are nothing without.
BESIDE: dict[str, dict[str, Any]] = {
    "insecure": {},
    "tls_certificate": {"tls_key": "/another"},
    "tls_key": {"tls_certificate": "/another"},
    "tls_client_ca": {"listen": ("grpcs://127.0.0.1:0",), "tls_certificate": "/one", "tls_key": "/two"},
    "kserve": {"models": "/models"},
    "kserve_http": {"models": "/models"},
}


def test_every_setting_has_a_key_a_variable_and_a_flag(tmp_path: Path) -> None:
    """One after the other, each of them alone, for every setting that there is."""
    for one in entries(ServerConfig):
        value, text = another_value(one)
        table = f"[{one.table}]\n" if one.table else ""
        flag = ("--limit", "--quota")[one.table == "quota"] if one.table else one.flag
        words = (flag, f"{one.name}={text}" if one.table else text)
        if one.type is bool:
            words = (flag if value else flag.replace("--", "--no-"),)
        (tmp_path / "flags").mkdir(exist_ok=True)
        above = BESIDE.get(one.key, {"insecure": True})
        others = {
            name.upper(): value if isinstance(value, str) else value[0]
            for name, value in above.items()
            if name != "insecure"
        }
        from_file = load_config(write(tmp_path, f"{table}{one.name} = {json.dumps(value)}"), above)
        from_variable = from_command_line(**{one.variable.removeprefix("HELIOGRAPH_"): text}, **others)
        for config in (from_file, from_variable, from_command_line(*words, **others)):
            holder = getattr(config, one.table) if one.table else config
            found = getattr(holder, one.name)
            assert found not in (one.default, None), one.key
            assert (list(found) if isinstance(found, tuple) else found) == value, one.key


def another_value(entry: SettingEntry) -> tuple[Any, str]:
    """A value that is not the default, and how variables and flags have it."""
    if entry.type is bool:
        return not entry.default, str(not entry.default).lower()
    if entry.type in (int, float):
        return entry.type(7), "7"
    if entry.type is str:
        others = {"kserve": "unix:///a", "kserve_http": "127.0.0.1:0", "web": "127.0.0.1:0"}
        text = entry.setting.words[-1] if entry.setting.words else others.get(entry.name, "/a/file")
        return text, text
    text = {"listen": "unix:///a", "web_llm": "http://a:1", "devices": "cpu:threads=2,memory=4GiB"}.get(
        entry.name, "one.two"
    )
    return [text], text


def test_flags_win_over_variables_and_variables_over_the_file(tmp_path: Path) -> None:
    path = write(
        tmp_path, 'drain_seconds = 1\nlog_level = "debug"\ncache = "here"\n[limits]\ntensors = 1\nplans = 1'
    )
    words = ("--config", str(path), "--drain-seconds", "3", "--limit", "tensors=3")
    config = from_command_line(*words, DRAIN_SECONDS="2", LOG_LEVEL="error", LIMITS_TENSORS="2")
    assert (config.drain_seconds, config.log_level, config.cache) == (3.0, "error", f"{tmp_path}/here")
    assert (config.limits.tensors, config.limits.plans) == (3, 1)
    assert config.limits.graph_nodes == Limits().graph_nodes


def test_a_variable_names_the_file_unless_a_flag_does(tmp_path: Path) -> None:
    path = write(tmp_path, "drain_seconds = 1")
    (tmp_path / "other.toml").write_text("drain_seconds = 2")
    assert from_command_line(CONFIG=str(path)).drain_seconds == 1.0
    assert from_command_line("--config", f"{tmp_path}/other.toml", CONFIG=str(path)).drain_seconds == 2.0


def test_lists_have_commas_in_variables(tmp_path: Path) -> None:
    config = from_command_line(
        LISTEN="grpc://127.0.0.1:1, unix:///a",
        BACKENDS="",
        DEVICES="cpu:threads=2,memory=4GiB,fake,remote:url=grpc://a:1,device=cpu0,cuda",
    )
    assert config.listen == ("grpc://127.0.0.1:1", "unix:///a") and config.backends == ()
    assert config.devices == (
        "cpu:threads=2,memory=4GiB",
        "fake",
        "remote:url=grpc://a:1,device=cpu0",
        "cuda",
    )


def test_a_flag_turns_off_what_the_file_turned_on(tmp_path: Path) -> None:
    path = write(tmp_path, "insecure = true\nshared_memory = false")
    config = from_command_line("--config", str(path), "--no-insecure", "--shared-memory")
    assert (config.insecure, config.shared_memory) == (False, True)


def test_sizes_may_be_written_with_units_everywhere(tmp_path: Path) -> None:
    path = write(tmp_path, 'cache_size = "1GiB"\n[quota]\nstaging_bytes = "2MiB"\ndevice_memory_bytes = 5')
    config = from_command_line("--config", str(path), "--limit", "message_bytes=1KiB", CACHE_SIZE="3GiB")
    assert (config.cache_size, config.quota) == (3 * 2**30, Quota(staging_bytes=2**21, device_memory_bytes=5))
    assert config.limits.message_bytes == 1024


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("DRIAN_SECONDS", "1", "did you mean 'HELIOGRAPH_DRAIN_SECONDS'?"),
        ("LIMITS_TENSOR", "1", "did you mean 'HELIOGRAPH_LIMITS_TENSORS'?"),
        ("TOKNE", "x", "did you mean 'HELIOGRAPH_TOKEN'?"),
        ("XYZZY", "1", "unknown variable HELIOGRAPH_XYZZY"),
        ("DRAIN_SECONDS", "long", "HELIOGRAPH_DRAIN_SECONDS is 'long'"),
        ("DRAIN_SECONDS", "-1", "a number, 0 to 86400"),
        ("DRAIN_SECONDS", "", "a number"),
        ("INSECURE", "maybe", "true or false"),
        ("CACHE_SIZE", "20GB", "a size, such as"),
        ("LIMITS_TENSORS", "1.5", "a whole number, 1 to"),
        ("QUOTA_WEIGHT", "nan", "HELIOGRAPH_QUOTA_WEIGHT is nan"),
        ("LISTEN", "", "at least one"),
        ("LOG_LEVEL", "inof", "did you mean 'info'?"),
    ],
)
def test_what_is_wrong_in_a_variable_is_said_with_its_name(name: str, text: str, said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        from_command_line(**{name: text})
    assert said in str(caught.value) and f"HELIOGRAPH_{name}" in str(caught.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--limit tensor=5", "did you mean 'tensors'?"),
        ("--limit tensors", "write --limit tensors=VALUE"),
        ("--limit tensors=many", "--limit tensors is 'many'"),
        ("--quota weight=0", "a number, 0.001 to 1000"),
        ("--quota sessions=-1", "0 to"),
        ("--drain-seconds long", "--drain-seconds is 'long'"),
        ("--max-connections 1e3", "a whole number"),
        ("--cache-size 0GiB", "a size, such as"),
        ("--log-format jsno", "did you mean 'json'?"),
    ],
)
def test_what_is_wrong_in_a_flag_is_said_with_its_name(words: str, said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        from_command_line(*words.split())
    assert said in str(caught.value) and words.split()[0] in str(caught.value)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--drain-secnods", "did you mean '--drain-seconds'?"),
        ("--drain", "did you mean '--drain-seconds'?"),
        ("--port", "--listen 127.0.0.1:PORT"),
        ("--host=0.0.0.0", "--listen HOST:PORT"),
        ("--threads", "--device cpu:threads=N"),
        ("--devise=cpu", "did you mean '--device'?"),
        ("7070", "--help"),
    ],
)
def test_an_option_that_there_is_not_is_refused_with_one_that_there_is(
    word: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", word]) == 1
    assert said in capsys.readouterr().err


def test_what_others_call_so_is_no_setting() -> None:
    """The client's variables, and those of every container beside a Kubernetes service of that name."""
    others = {"SERVER": "a:1", "TENANT": "somebody", "TOKEN": "secret", "KERNEL_CACHE": "/k"}
    of_service = dict.fromkeys(
        ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_GRPC", "PORT", "PORT_7070_TCP", "PORT_7070_TCP_ADDR"),
        "x",
    )
    of_another = {"METRICS_SERVICE_HOST": "x", "METRICS_PORT_9090_TCP_PROTO": "x"}
    assert from_command_line(**others, **of_service, **of_another) == ServerConfig()
    assert not any(OF_A_SERVICE.fullmatch(one.variable) for one in entries(ServerConfig))


def test_every_variable_that_the_code_names_is_known_to_the_daemon() -> None:
    """Or the daemon would refuse to start where a client's variable is set."""
    known = {one.variable for one in entries(ServerConfig)} | OTHER_VARIABLES
    for package in ("proto", "client", "backends", "server"):
        for path in (ROOT / package).rglob("*.py"):
            named = set(re.findall(r'"(HELIOGRAPH_[A-Z0-9_]*[A-Z0-9])"', path.read_text()))
            assert named <= known, path


RUN_PAGE = ROOT / "docs/operate/run.md"


def test_the_table_of_the_documentation_says_the_same_in_its_three_columns(tmp_path: Path) -> None:
    text = RUN_PAGE.read_text().partition("| in the file | in the environment | on the command line |\n")[2]
    rows = [re.findall(r"`([^`]+)`", line) for line in text.partition("\n\n")[0].splitlines()[1:]]
    assert len(rows) == 5
    for *of_file, variable, words in rows:
        name, _, value = variable.removeprefix("HELIOGRAPH_").partition("=")
        # "`KEY = VALUE` below `[TABLE]`"
        from_file = load_config(write(tmp_path, "\n".join(reversed(of_file))))
        assert from_file == from_command_line(**{name: value}) == from_command_line(*words.split())
        assert from_file != ServerConfig()


EXAMPLE = DEPLOY / "heliograph.toml"


def test_the_example_is_what_the_code_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--print-config"]) == 0
    assert EXAMPLE.read_text() == capsys.readouterr().out, (
        "make it anew: heliograph serve --print-config > deploy/heliograph.toml"
    )


def test_what_was_printed_is_read_back(tmp_path: Path) -> None:
    config = ServerConfig(
        listen=('unix:///a/"quoted"/\u00fc',),
        backends=("back\\slash", "new\nline", "del\x7f", "\U0001f600"),
        devices=("cpu:threads=2,memory=1GiB", "fake"),
        cache_size=12345,
        limits=Limits(tensors=7, message_bytes=3 * 2**20),
        quota=Quota(weight=0.1, staging_bytes=2**62),
        pool_silence_seconds=0.3,
        models="/srv/models",
        log_format="json",
    )
    assert load_config(write(tmp_path, as_file(config))) == config


def test_the_example_has_every_setting_with_its_default() -> None:
    assert load_config(EXAMPLE) == ServerConfig()
    table = tomllib.loads(EXAMPLE.read_text())
    assert set(table) == {field.name for field in fields(ServerConfig)}
    assert set(table["limits"]) == {field.name for field in fields(Limits)}


def test_the_example_explains_every_setting() -> None:
    paragraphs = EXAMPLE.read_text().split("\n\n")
    assert all(paragraph.startswith("#") for paragraph in paragraphs)
