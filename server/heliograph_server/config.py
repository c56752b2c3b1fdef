"""The server's configuration: defaults, then a TOML file, then the command line.

    listen = ["grpc://127.0.0.1:7070", "unix:///run/heliograph/socket"]
    backends = ["/usr/lib/heliograph/backends"]
    devices = ["cpu:threads=2"]
    drain_seconds = 30
    cache = "/var/cache/heliograph"
    cache_size = "20GiB"
    models = "/srv/models"
    shared_memory = true
    pool = "static:left:7070,right:7070"
    pool_silence_seconds = 3

    [limits]
    tensors = 100000

Whatever is wrong raises ConfigurationError, with advice.
"""

from __future__ import annotations

import argparse
import logging
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from heliograph_proto.addresses import DEFAULT_URL, Address, parse_address
from heliograph_proto.errors import ConfigurationError, InvalidArgumentError
from heliograph_proto.limits import Limits
from heliograph_proto.sizes import parse_size
from heliograph_server.core.principals import Quota

LOG_LEVELS = ("debug", "info", "warning", "error")
#: The most seconds that draining may be given; what is longer is a mistake.
MAX_DRAIN_SECONDS = 86_400.0
#: The least and the most seconds of silence after which a member of a pool is lost.
SILENCE_SECONDS = 0.25, 3600.0
#: Settings that are options of the command line too.
OPTIONS = (
    "listen",
    "insecure",
    "backends",
    "devices",
    "cache",
    "cache_size",
    "models",
    "shared_memory",
    "pool",
    "pool_silence_seconds",
    "drain_seconds",
    "log_level",
    "traces",
)
#: Limits travel in 32 or 64 bits.
MAX_LIMIT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Everything that an operator decides."""

    #: Where to listen: grpc://HOST:PORT (port 0: any free one) or unix:///PATH.
    listen: tuple[str, ...] = (DEFAULT_URL,)
    #: Whether others than this host may connect without showing a token or a certificate.
    insecure: bool = False
    #: PEM files of the certificates and the key that grpcs:// addresses show; read again when they change.
    tls_certificate: str = ""
    tls_key: str = ""
    #: A PEM file of authorities, of which clients are to show a certificate (mutual TLS); empty: none asked.
    tls_client_ca: str = ""
    #: The file of tokens that clients are to show, which `heliograph token new` makes; empty: none is asked.
    tokens: str = ""
    #: What this daemon shows to members of its pool and to daemons that it exchanges values with: a file with
    #: one token, authorities that vouch for them, and a certificate and key of its own. Empty: nothing.
    pool_token: str = ""
    pool_ca: str = ""
    pool_certificate: str = ""
    pool_key: str = ""
    #: Where grpc.health.v1 alone is answered, in the clear, HOST:PORT; empty: only with everything else.
    health_listen: str = ""
    #: Where Prometheus finds metrics, HOST:PORT; empty: nowhere.
    metrics_listen: str = ""
    #: Where traces go, by OTLP: http(s)://HOST:PORT of a collector; empty: nowhere.
    traces: str = ""
    #: The most connections at once; 0: as many as the process has descriptors for.
    max_connections: int = 0
    #: Plugins: modules, files ending in .py, or directories of such. Their code is run.
    backends: tuple[str, ...] = ()
    #: What there is, by priority: backends and their parameters, such as "cpu:threads=2,memory=4GiB".
    devices: tuple[str, ...] = ("cpu",)
    #: A folder that keeps contents of weights for later sessions; empty: none. Daemons may share it.
    cache: str = ""
    #: The most bytes of it.
    cache_size: int = 20 * 2**30
    #: A folder of safetensors and GGUF files that every client may use as weights; empty: none.
    models: str = ""
    #: Whether tensors of clients on this host, and of the same user, go through memory that both map.
    shared_memory: bool = True
    #: The daemons whose devices are offered behind its own, "static:a:7070,b:7070" or "dns:NAME:PORT"; empty:
    #: none.
    pool: str = ""
    #: How long one of them may say nothing before it is lost.
    pool_silence_seconds: float = 3.0
    #: How long running work may go on after SIGTERM.
    drain_seconds: float = 30.0
    limits: Limits = field(default_factory=Limits)
    #: What each tenant may have, unless its token says otherwise.
    quota: Quota = field(default_factory=Quota)
    log_level: str = "info"
    #: "human" or "json": one line for each event.
    log_format: str = "human"

    def __post_init__(self) -> None:
        if not self.listen or not self.devices:
            raise ConfigurationError("listen and devices must name at least one each")
        for address in self.addresses:
            _check_reach(address, self.insecure)
        if not 0 <= self.drain_seconds <= MAX_DRAIN_SECONDS:
            limits = f"it is 0 to {MAX_DRAIN_SECONDS:.0f}"
            raise ConfigurationError(f"drain_seconds is {self.drain_seconds}", advice=limits)
        least, most = SILENCE_SECONDS
        if not least <= self.pool_silence_seconds <= most:
            raise ConfigurationError(
                f"pool_silence_seconds is {self.pool_silence_seconds}", advice=f"it is {least} to {most:.0f}"
            )
        if self.log_level not in LOG_LEVELS:
            advice = suggest(self.log_level, LOG_LEVELS)
            raise ConfigurationError(f"log_level is {self.log_level!r}", advice=advice)

    @property
    def addresses(self) -> tuple[Address, ...]:
        """`listen`, parsed."""
        return tuple(map(_listen_address, self.listen))

    @property
    def log_level_number(self) -> int:
        return logging.getLevelNamesMapping()[self.log_level.upper()]


def load_config(path: Path | None = None, overrides: Mapping[str, Any] | None = None) -> ServerConfig:
    """The configuration of a TOML file, if any, with overrides by field name. Raises ConfigurationError."""
    table = _read(path) if path is not None else {}
    where = f"{path}: " if path is not None else ""
    values = _checked(table, where)
    if path is not None:
        for key in ("cache", "models"):
            if values.get(key):
                values[key] = str(path.parent.absolute() / values[key])
        values["backends"] = tuple(_from_here(path.parent, one) for one in values.get("backends", ()))
    return ServerConfig(**(values | dict(overrides or {})))


def _from_here(folder: Path, backend: str) -> str:
    """A plugin as a configuration file in this folder names it: its paths begin there."""
    return str(folder.absolute() / backend) if "/" in backend or backend.endswith(".py") else backend


def suggest(word: str, known: Collection[str]) -> str:
    """Advice for a word that is not among those known."""
    near = get_close_matches(word, known, 1)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `heliograph serve`."""
    add = parser.add_argument
    add("--config", type=Path, metavar="FILE.toml", help="a configuration file; options here win")
    add("--listen", action="append", metavar="URL", help=f"grpc://HOST:PORT or unix:///PATH ({DEFAULT_URL})")
    add("--insecure", action="store_true", default=None, help="let other hosts connect, in the clear")
    add(
        "--backend",
        action="append",
        dest="backends",
        metavar="PLUGIN",
        help="a module, a FILE.py or a DIRECTORY/ of such, whose code is run; repeat for several. One that "
        "cannot be loaded is reported, and the others serve",
    )
    add(
        "--device",
        action="append",
        dest="devices",
        metavar="SPEC",
        help="NAME[:key=value,...], such as cpu:threads=2,memory=8GiB (cpu); repeat for several, by priority",
    )
    add("--cache", metavar="DIR", help="keep weights there, so that they are uploaded once (not kept)")
    add("--cache-size", type=_size, metavar="SIZE", help="the most bytes of it, such as 50GiB (20GiB)")
    add("--models", metavar="DIR", help="let clients use the safetensors and GGUF files there as weights")
    add(
        "--no-shared-memory",
        action="store_false",
        default=None,
        dest="shared_memory",
        help="let tensors of clients on this host go through sockets, too",
    )
    add(
        "--pool",
        metavar="SOURCE",
        help="offer other daemons' devices too, as HOST/DEVICE: static:HOST:PORT,NAME=HOST:PORT,... or "
        "dns:NAME:PORT for every address of a name",
    )
    add(
        "--pool-silence-seconds",
        type=float,
        metavar="N",
        help="how long one of them may say nothing before it is lost (3)",
    )
    add("--drain-seconds", type=float, metavar="N", help="how long running work may go on at the end (30)")
    add("--traces", metavar="URL", help="a collector of OTLP over gRPC, such as http://127.0.0.1:4317 (none)")
    add("--log-level", choices=LOG_LEVELS, help="(info)")


def _size(text: str) -> int:
    size = parse_size(text)
    if not size:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; such as 20GiB")
    return size


def config_from_arguments(arguments: argparse.Namespace) -> ServerConfig:
    """The configuration that a command line asks for. Raises ConfigurationError."""
    overrides: dict[str, Any] = {}
    for name in OPTIONS:
        value = getattr(arguments, name)
        if value is not None:
            overrides[name] = tuple(value) if isinstance(value, list) else value
    return load_config(arguments.config, overrides)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}", advice="check --config") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} is no TOML: {error}") from None


def _checked(table: Mapping[str, Any], where: str) -> dict[str, Any]:
    known = {one.name: one for one in fields(ServerConfig)}
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in known:
            raise ConfigurationError(f"{where}unknown key {key!r}", advice=suggest(key, known))
        values[key] = _limits(value, where) if key == "limits" else _value(key, value, where)
    return values


def _value(key: str, value: Any, where: str) -> Any:
    """A value of the type that the field has."""
    match key, value:
        case "listen" | "backends" | "devices", list() if all(isinstance(one, str) for one in value):
            return tuple(value)
        case "insecure" | "shared_memory", bool():
            return value
        case "cache_size", str() if size := parse_size(value):
            return size
        case "cache" | "models" | "pool" | "traces", str():
            return value
        case "drain_seconds" | "pool_silence_seconds", int() | float() if not isinstance(value, bool):
            return float(value)
        case "log_level", str():
            return value
    expected = {
        "listen": "a list of texts",
        "backends": "a list of texts",
        "devices": "a list of texts",
        "insecure": "true or false",
        "shared_memory": "true or false",
        "drain_seconds": "a number",
        "log_level": "a text",
        "cache": "a folder",
        "cache_size": 'a size, such as "20GiB"',
        "models": "a folder",
        "traces": "the URL of a collector",
        "pool": 'a source, such as "static:a:7070,b:7070"',
        "pool_silence_seconds": "a number",
    }[key]
    raise ConfigurationError(f"{where}{key} is {value!r}", advice=f"it must be {expected}")


def _limits(table: Any, where: str) -> Limits:
    if not isinstance(table, dict):
        raise ConfigurationError(f"{where}limits is {table!r}", advice="write a table: [limits]")
    known = [one.name for one in fields(Limits)]
    for key, value in table.items():
        if key not in known:
            raise ConfigurationError(f"{where}unknown limit {key!r}", advice=suggest(key, known))
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MAX_LIMIT:
            advice = f"it must be 1 to {MAX_LIMIT}"
            raise ConfigurationError(f"{where}limit {key} is {value!r}", advice=advice)
    return replace(Limits(), **table)


def _listen_address(url: str) -> Address:
    try:
        address = parse_address(url)
    except InvalidArgumentError as error:
        raise ConfigurationError(f"cannot listen at {url!r}: {error.message}", advice=error.advice) from None
    if address.scheme == "local" or address.device:
        raise ConfigurationError(
            f"cannot listen at {url!r}", advice="give grpc://HOST:PORT or unix:///PATH, without a device"
        )
    return address


def _check_reach(address: Address, insecure: bool) -> None:
    if not address.is_loopback and not insecure:
        raise ConfigurationError(
            f"{address} can be reached from other hosts, in the clear and without authentication",
            advice="listen at 127.0.0.1 and use an SSH tunnel, or say --insecure if the network is trusted",
        )
