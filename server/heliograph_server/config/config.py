"""The server's configuration: every setting is a field here, and what is said of it is said here alone.

Keys of a TOML file, variables (HELIOGRAPH_DRAIN_SECONDS, HELIOGRAPH_LIMITS_TENSORS) and flags
(--drain-seconds 5, --limit tensors=5) are made of the fields, as is deploy/heliograph.toml.
Flags win over variables, those over the file, the file over defaults. Whatever is wrong raises
ConfigurationError, with the place and advice.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from heliograph_proto.addresses import DEFAULT_URL, Address, parse_address, without_token
from heliograph_proto.errors import ConfigurationError, InvalidArgumentError
from heliograph_proto.sessions import LEVELS, LONGEST_DRAIN_SECONDS, Limits, Quota
from heliograph_proto.settings import Setting
from heliograph_server.config import example, sources
from heliograph_server.config.exposure import check_access
from heliograph_server.config.schema import suggest
from heliograph_server.config.values import check_all

#: The variable that names the file, as --config does.
CONFIG_VARIABLE = "HELIOGRAPH_CONFIG"
#: Variables that begin as the daemon's do and are others' affair: the client's, and the kernel cache's.
OTHER_VARIABLES = frozenset(
    {
        CONFIG_VARIABLE,
        "HELIOGRAPH_CA",
        "HELIOGRAPH_CERTIFICATE",
        "HELIOGRAPH_KERNEL_CACHE",
        "HELIOGRAPH_KEY",
        "HELIOGRAPH_SERVER",
        "HELIOGRAPH_TENANT",
        "HELIOGRAPH_TOKEN",
        "HELIOGRAPH_TOKEN_FILE",
    }
)

EPILOG = (
    "Each of these can be said in the file and by a variable, too: --drain-seconds 5 is drain_seconds = 5 "
    "and HELIOGRAPH_DRAIN_SECONDS=5, --limit tensors=5 is tensors = 5 in [limits] and "
    "HELIOGRAPH_LIMITS_TENSORS=5. Options win over variables, variables over the file."
)
#: What a file begins with that `--print-config` makes.
HEADING = """\
What a daemon goes by. `heliograph serve --print-config` makes this file, and reads it back:

    heliograph serve --config heliograph.toml

What is not said has its default. Variables win over the file, HELIOGRAPH_DRAIN_SECONDS=5 or
HELIOGRAPH_LIMITS_TENSORS=5, with commas in lists; options of the command line win over both,
--drain-seconds 5 or --limit tensors=5. Paths begin at this file's folder.

When the file changes, and on SIGHUP, the daemon reads it again."""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Everything that an operator decides."""

    listen: Annotated[
        tuple[str, ...],
        Setting(
            "Where to listen: grpc://HOST:PORT, grpcs://HOST:PORT with TLS, or unix:///PATH.",
            "IPv6: grpc://[::1]:7070; port 0: any free one. The folder of a socket must exist; the socket "
            "is its "
            "owner's alone.",
            least=1,
            shown="URL",
            section="where it listens",
        ),
    ] = (DEFAULT_URL,)
    insecure: Annotated[
        bool,
        Setting("Whether other hosts may connect in the clear, without showing a token or a certificate."),
    ] = False
    tls_certificate: Annotated[
        str,
        Setting(
            "A PEM file with the certificate that grpcs:// addresses show.",
            "It is read again when it changes, as the key is.",
            kind="path",
            shown="FILE",
            section="who may connect",
        ),
    ] = ""
    tls_key: Annotated[str, Setting("A PEM file with its private key.", kind="path", shown="FILE")] = ""
    tls_client_ca: Annotated[
        str,
        Setting(
            "A PEM file of authorities, of which clients are to show a certificate (mutual TLS).",
            '"" asks for none.',
            kind="path",
            shown="FILE",
        ),
    ] = ""
    tokens: Annotated[
        str,
        Setting(
            "A file of the tokens that clients are to show, which `heliograph token new` makes.",
            "It is read again when it changes. One that is not there is made, with a first token that is "
            'printed once. "" asks for none.',
            kind="path",
            shown="FILE",
        ),
    ] = ""
    pool_token: Annotated[
        str,
        Setting(
            "A file with the one token that this daemon shows to other daemons.",
            "Those are members of its pool, and others that it exchanges values with.",
            kind="path",
            shown="FILE",
            section="what it shows to other daemons",
        ),
    ] = ""
    pool_ca: Annotated[
        str,
        Setting("A PEM file of the authorities that vouch for other daemons.", kind="path", shown="FILE"),
    ] = ""
    pool_certificate: Annotated[
        str,
        Setting(
            "A PEM file with the certificate that this daemon shows to other daemons.",
            kind="path",
            shown="FILE",
        ),
    ] = ""
    pool_key: Annotated[str, Setting("A PEM file with its private key.", kind="path", shown="FILE")] = ""
    health_listen: Annotated[
        str,
        Setting(
            "Where grpc.health.v1 alone is answered, in the clear, as HOST:PORT.",
            '"": only where everything else is.',
            shown="HOST:PORT",
            section="what it tells of itself",
        ),
    ] = ""
    metrics_listen: Annotated[
        str, Setting("Where Prometheus finds metrics, as HOST:PORT.", '"": nowhere.', shown="HOST:PORT")
    ] = ""
    traces: Annotated[
        str,
        Setting("Where traces go by OTLP: http(s)://HOST:PORT of a collector.", '"": nowhere.', shown="URL"),
    ] = ""
    max_connections: Annotated[
        int,
        Setting(
            "The most connections at once at each address; 0: what the process has descriptors for.",
            least=0,
            most=2**20,
            shown="N",
            section="where it listens",
        ),
    ] = 0
    backends: Annotated[
        tuple[str, ...],
        Setting(
            "Plugins with further backends: a module, a FILE.py or a DIRECTORY/ of such, whose code is run.",
            "Paths begin at this file's folder. The code has all rights of the daemon, so only its user and "
            "root may be able to write to it. One that cannot be loaded is reported, and the others serve; "
            "`devices` says what is used.",
            kind="plugin",
            flag="--backend",
            shown="PLUGIN",
            section="what it computes on",
        ),
    ] = ()
    devices: Annotated[
        tuple[str, ...],
        Setting(
            "What there is to compute on, by priority: NAME[:key=value,...], such as "
            "cpu:threads=2,memory=8GiB.",
            "cpu: threads (all processors), memory (of tensors; most of the host's).",
            least=1,
            kind="device",
            flag="--device",
            shown="SPEC",
        ),
    ] = ("cpu",)
    cache: Annotated[
        str,
        Setting(
            "A folder that keeps uploaded weights for later sessions, made if it is missing.",
            "Daemons of one user may share it. `heliograph cache` lists, removes and checks what is there. "
            '"" keeps none.',
            kind="path",
            shown="DIR",
            section="weights",
        ),
    ] = ""
    cache_size: Annotated[
        int,
        Setting(
            "The most bytes of that folder; what was not used for longest goes first.",
            least=1,
            most=2**63 - 1,
            kind="size",
            shown="SIZE",
            live=True,
        ),
    ] = 20 * 2**30
    models: Annotated[
        str,
        Setting(
            "A folder of safetensors and GGUF files that every client may use as weights, so that none "
            "uploads them.",
            '"" allows none.',
            kind="path",
            shown="DIR",
        ),
    ] = ""
    shared_memory: Annotated[
        bool,
        Setting(
            "Whether tensors of clients on this host, and of the same user, go through memory that both "
            "map, instead "
            "of sockets."
        ),
    ] = True
    pool: Annotated[
        str,
        Setting(
            "Other daemons whose devices are offered too, as HOST/DEVICE: "
            "static:HOST:PORT,NAME=HOST:PORT,... or "
            "dns:NAME:PORT for every address of a name.",
            "One graph then runs on several of them. Members come and go.",
            shown="SOURCE",
            section="other daemons",
        ),
    ] = ""
    pool_silence_seconds: Annotated[
        float,
        Setting(
            "How long a member may say nothing before it is lost, in seconds.",
            "One that was killed is lost at once.",
            least=0.25,
            most=3600,
            shown="N",
        ),
    ] = 3.0
    drain_seconds: Annotated[
        float,
        Setting(
            "How long running work may go on after SIGTERM, in seconds.",
            "A second signal ends it at once.",
            least=0,
            most=LONGEST_DRAIN_SECONDS,
            shown="N",
            section="its end, and its log",
            live=True,
        ),
    ] = 30.0
    limits: Annotated[
        Limits,
        Setting(
            "What one session may send and keep.",
            "The handshake tells these numbers to every client.",
            flag="--limit",
            section="how much",
        ),
    ] = field(default_factory=Limits)
    quota: Annotated[
        Quota,
        Setting(
            "The most that each tenant may have at once, over all its sessions, unless its token says "
            "otherwise; 0: as much as there is.",
            live=True,
        ),
    ] = field(default_factory=Quota)
    log_level: Annotated[
        str,
        Setting("What is said on stderr.", words=LEVELS, section="its end, and its log", live=True),
    ] = "info"
    log_format: Annotated[
        str,
        Setting("How the log is written: for people, or as one JSON object a line.", words=("human", "json")),
    ] = "human"

    def __post_init__(self) -> None:
        check_all(self)
        check_access(self)

    @property
    def addresses(self) -> tuple[Address, ...]:
        """`listen`, parsed."""
        return tuple(map(_listen_address, self.listen))


#: What options that other servers have are called here.
OTHERS_OPTIONS = {
    **dict.fromkeys(("--port", "-p"), "write --listen 127.0.0.1:PORT"),
    **dict.fromkeys(("--host", "--bind", "--address"), "write --listen HOST:PORT"),
    "--threads": "write --device cpu:threads=N",
    "--memory": "write --device cpu:memory=SIZE",
    "--gpu": "write --device cuda",
    "--debug": "write --log-level debug",
}


def unknown_option(word: str) -> ConfigurationError:
    """What to say of an option that `heliograph serve` does not have."""
    option = word.partition("=")[0]
    advice = OTHERS_OPTIONS.get(option) or suggest(
        option, ("--config", *sources.flags(ServerConfig)), sources.HELP
    )
    return ConfigurationError(f"unknown option {word!r:.200}", advice=advice)


@dataclass(frozen=True, slots=True)
class Sources:
    """Where a configuration comes from: a file, which may change, and what else is said, by key."""

    path: Path | None = None
    above: Mapping[str, Any] = field(default_factory=dict)

    def load(self) -> ServerConfig:
        """The configuration as it is now. Raises ConfigurationError."""
        return self.parse(b"" if self.path is None else sources.read_file(self.path))

    def parse(self, content: bytes) -> ServerConfig:
        """The configuration when the file has this content. Raises ConfigurationError."""
        said = sources.of_file(ServerConfig, content, self.path) if self.path is not None else {}
        return sources.built(ServerConfig, {**said, **self.above})


def load_config(path: Path | None = None, above: Mapping[str, Any] | None = None) -> ServerConfig:
    """The configuration of a TOML file, if any, and what is above it, by key. Raises ConfigurationError."""
    return Sources(path, above or {}).load()


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `heliograph serve`."""
    parser.usage, parser.epilog = "%(prog)s [OPTION ...]", EPILOG
    help_text = f"a configuration file; what is said here wins [${CONFIG_VARIABLE}]"
    parser.add_argument("--config", type=Path, metavar="FILE.toml", help=help_text)
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print what the daemon would go by, as a file with comments",
    )
    sources.add_flags(ServerConfig, parser)


def sources_from_arguments(
    arguments: argparse.Namespace, environment: Mapping[str, str] = os.environ
) -> Sources:
    """Where the configuration of a command line, in an environment, comes from. Raises ConfigurationError."""
    named = environment.get(CONFIG_VARIABLE)
    path: Path | None = arguments.config or (Path(named) if named else None)
    above = sources.of_environment(ServerConfig, environment, OTHER_VARIABLES)
    return Sources(path, above | sources.of_flags(ServerConfig, arguments))


def config_from_arguments(
    arguments: argparse.Namespace, environment: Mapping[str, str] = os.environ
) -> ServerConfig:
    """The configuration that a command line asks for, in an environment. Raises ConfigurationError."""
    return sources_from_arguments(arguments, environment).load()


def as_file(config: ServerConfig) -> str:
    """The configuration as a file with comments, which `--config` reads."""
    return example.as_file(config, HEADING)


def _listen_address(url: str) -> Address:
    try:
        address = parse_address(url)
    except InvalidArgumentError as error:
        cause = f"cannot listen at {without_token(url)!r}: {error.message}"
        raise ConfigurationError(cause, advice=error.advice) from None
    if address.scheme == "local" or address.device:
        raise ConfigurationError(
            f"cannot listen at {without_token(url)!r}",
            advice="give grpc://HOST:PORT, grpcs://HOST:PORT or unix:///PATH, without a device",
        )
    return address
