"""The server's configuration: every setting is a field here, with its documentation.

The fields give the keys of a TOML file, the variables (HELIOGRAPH_DRAIN_SECONDS,
HELIOGRAPH_LIMITS_TENSORS), the flags (--drain-seconds 5, --limit tensors=5) and
deploy/heliograph.toml. Flags override variables, variables override the file, and the file
overrides defaults. A mistake raises ConfigurationError with its place and advice.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, get_args

from heliograph_proto.addresses import DEFAULT_URL, Address
from heliograph_proto.devices import Activations
from heliograph_proto.errors import ConfigurationError
from heliograph_proto.sessions import LEVELS, LONGEST_DRAIN_SECONDS, LONGEST_LEASE_SECONDS, Limits, Quota
from heliograph_proto.settings import Setting
from heliograph_server.config import example, sources
from heliograph_server.config.addresses import KeptElsewhere, kept_elsewhere, listen_address, web_address
from heliograph_server.config.exposure import check_access
from heliograph_server.config.schema import suggest
from heliograph_server.config.values import check_all

#: The variable that names the file, like --config.
CONFIG_VARIABLE = "HELIOGRAPH_CONFIG"
#: Variables with the same prefix that are not settings of the daemon: the client's, and the kernel
#: cache's.
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
    "Each option is also a key of the file and a variable: --drain-seconds 5 is drain_seconds = 5 and "
    "HELIOGRAPH_DRAIN_SECONDS=5, --limit tensors=5 is tensors = 5 in [limits] and "
    "HELIOGRAPH_LIMITS_TENSORS=5. Options override variables, variables override the file."
)
#: The first lines of a file that `--print-config` prints.
HEADING = """\
Configuration of a daemon, printed by `heliograph serve --print-config`. To use it:

    heliograph serve --config heliograph.toml

Missing settings have their defaults. Variables override the file (HELIOGRAPH_DRAIN_SECONDS=5,
HELIOGRAPH_LIMITS_TENSORS=5, commas in lists), and command line options override both
(--drain-seconds 5, --limit tensors=5). Paths are relative to the folder of this file.

The daemon reads the file again when it changes, and on SIGHUP."""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The settings of a daemon."""

    listen: Annotated[
        tuple[str, ...],
        Setting(
            "Addresses to listen at: grpc://HOST:PORT, grpcs://HOST:PORT with TLS, or unix:///PATH.",
            "IPv6: grpc://[::1]:7070. Port 0 is any free port. The folder of a socket must exist; only its "
            "owner can use the socket.",
            least=1,
            shown="URL",
            section="listening",
        ),
    ] = (DEFAULT_URL,)
    insecure: Annotated[
        bool,
        Setting("Allow other hosts to connect without a token or a certificate, and tokens in plain text."),
    ] = False
    kserve: Annotated[
        str,
        Setting(
            "Address for KServe's and Triton's clients, by gRPC: HOST:PORT, grpcs://HOST:PORT with TLS, or "
            "unix:///PATH.",
            'It serves NAME/VERSION/model.onnx, .hgraph and .gguf in the folder `models`. "": none.',
            shown="ADDRESS",
        ),
    ] = ""
    kserve_http: Annotated[
        str,
        Setting(
            "Address for the same clients by HTTP: HOST:PORT, or https://HOST:PORT with TLS.",
            "Needs the extra heliograph[kserve], as ONNX models do; language models need heliograph[llm].",
            shown="ADDRESS",
        ),
    ] = ""
    kserve_shared_memory: Annotated[
        str,
        Setting(
            "User whose POSIX shared memory KServe's and Triton's clients may name in requests.",
            'Only where both addresses are of loopback or a unix socket. "": of no user.',
            shown="USER",
        ),
    ] = ""
    web: Annotated[
        str,
        Setting(
            "Address of the dashboard in the browser: HOST:PORT, or https://HOST:PORT with TLS.",
            'It asks for a token where clients do. Needs the extra heliograph[web]. "": none. See '
            "docs/operate/dashboard.md.",
            shown="ADDRESS",
        ),
    ] = ""
    web_llm: Annotated[
        tuple[str, ...],
        Setting(
            "Servers of language models (`heliograph llm-serve`) whose requests the dashboard shows to "
            "operators: http://HOST:PORT or https://HOST:PORT.",
            flag="--web-llm",
            shown="URL",
        ),
    ] = ()
    web_llm_token: Annotated[
        str,
        Setting(
            "File with the token that the dashboard presents to these servers.", kind="path", shown="FILE"
        ),
    ] = ""
    share: Annotated[
        bool,
        Setting(
            "Open the daemon to other hosts with a certificate and a token of its own, and print a URL with "
            "both.",
            "It listens at all addresses, unless `listen` says otherwise. Clients with the URL have the "
            "right `use`.",
        ),
    ] = False
    share_folder: Annotated[
        str,
        Setting(
            "Folder that keeps the certificate and the token of --share, so that the URL stays the same.",
            'It is created if it is missing. "" makes new ones at each start.',
            kind="path",
            shown="DIR",
        ),
    ] = ""
    tls_certificate: Annotated[
        str,
        Setting(
            "PEM file with the certificate of grpcs:// addresses.",
            "It is read again when it changes, and so is the key.",
            kind="path",
            shown="FILE",
            section="access",
        ),
    ] = ""
    tls_key: Annotated[
        str, Setting("PEM file with the private key of that certificate.", kind="path", shown="FILE")
    ] = ""
    tls_client_ca: Annotated[
        str,
        Setting(
            "PEM file of authorities; clients need a certificate of one of them (mutual TLS).",
            '"" requires none.',
            kind="path",
            shown="FILE",
        ),
    ] = ""
    tls_clients: Annotated[
        str,
        Setting(
            "File that gives names in client certificates a tenant, rights and a quota, where there are no "
            "tokens.",
            'It is read again when it changes. Other certificates, and all with "", have the right `use`, '
            "and their common name is the tenant.",
            kind="path",
            shown="FILE",
        ),
    ] = ""
    tokens: Annotated[
        str,
        Setting(
            "File of the tokens that clients need, managed by `heliograph token`.",
            "It is read again when it changes. A missing file is created, with a first token that is printed "
            'once. "" requires none.',
            kind="path",
            shown="FILE",
        ),
    ] = ""
    pool_token: Annotated[
        str,
        Setting(
            "File with the token that this daemon presents to other daemons.",
            "Those are the members of its pool, and daemons that it exchanges values with.",
            kind="path",
            shown="FILE",
            section="credentials for other daemons",
        ),
    ] = ""
    pool_ca: Annotated[
        str,
        Setting("PEM file of the authorities of other daemons' certificates.", kind="path", shown="FILE"),
    ] = ""
    pool_certificate: Annotated[
        str,
        Setting(
            "PEM file with the certificate that this daemon presents to other daemons.",
            kind="path",
            shown="FILE",
        ),
    ] = ""
    pool_key: Annotated[
        str, Setting("PEM file with the private key of that certificate.", kind="path", shown="FILE")
    ] = ""
    health_listen: Annotated[
        str,
        Setting(
            "Address for grpc.health.v1 only, in plain text.",
            '"": health is served at the other addresses only.',
            shown="HOST:PORT",
            section="observability",
        ),
    ] = ""
    metrics_listen: Annotated[
        str, Setting("Address for metrics, in Prometheus' format.", '"": none.', shown="HOST:PORT")
    ] = ""
    traces: Annotated[
        str,
        Setting("OTLP collector for traces: http(s)://HOST:PORT.", '"": none.', shown="URL"),
    ] = ""
    max_connections: Annotated[
        int,
        Setting(
            "Maximum number of connections at each address; 0: as many as the process has descriptors for.",
            least=0,
            most=2**20,
            shown="N",
            section="listening",
        ),
    ] = 0
    silence_seconds: Annotated[
        float,
        Setting(
            "Seconds of silence after which a client's connection is lost.",
            "The client is pinged after a fifth of that. A broken connection is lost at once. Clients have "
            "an option of the same name.",
            least=0.25,
            most=3600,
            shown="N",
        ),
    ] = 25.0
    max_calls: Annotated[
        int,
        Setting(
            "Maximum number of calls at once, of all clients.",
            "A session has at least one call, its command stream. Calls of operators are taken beyond it.",
            least=1,
            most=2**20,
            shown="N",
        ),
    ] = 16_384
    backends: Annotated[
        tuple[str, ...],
        Setting(
            "Backend plugins to load and run: a module, a FILE.py or a DIRECTORY/ of such files.",
            "The code runs with all rights of the daemon, so only its user and root may have write access to "
            "it. A plugin that cannot be loaded is reported, and the others serve; `devices` decides which "
            "are used.",
            kind="plugin",
            flag="--backend",
            shown="PLUGIN",
            section="devices",
        ),
    ] = ()
    devices: Annotated[
        tuple[str, ...],
        Setting(
            "Devices to serve, by priority: NAME[:key=value,...], such as cpu:threads=2,memory=8GiB.",
            "Keys of cpu: threads (default: all processors), memory (for tensors; default: most of the "
            "host's).",
            least=1,
            kind="device",
            flag="--device",
            shown="SPEC",
        ),
    ] = ("cpu",)
    cache: Annotated[
        str,
        Setting(
            "Folder that keeps uploaded weights for later sessions; created if it is missing.",
            "Daemons of one user may share it. `heliograph cache` lists, removes and checks its contents. "
            '"" keeps none.',
            kind="path",
            shown="DIR",
            section="weights",
        ),
    ] = ""
    cache_size: Annotated[
        int,
        Setting(
            "Maximum size of that folder; the least recently used weights are removed first.",
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
            "Folder of safetensors and GGUF files that every client may use as weights without an upload.",
            'It also has the models that `kserve` serves. "" offers none.',
            kind="path",
            shown="DIR",
        ),
    ] = ""
    state: Annotated[
        str,
        Setting(
            "Place that keeps the state of durable sessions over restarts: a folder, or another daemon's "
            "memory, grpc(s)://HOST:PORT/NAME.",
            "One daemon uses it at a time. A folder is created if it is missing; it has users' tensors, so "
            "only the daemon's user may open it. The other daemon needs kept_state_size. Without NAME it is "
            'this host\'s name with the port of the first address that is listened at. "" keeps none.',
            kind="path or URL",
            shown="PLACE",
            section="state",
        ),
    ] = ""
    snapshot_seconds: Annotated[
        float,
        Setting(
            "Seconds between snapshots of a durable session; 0: only when its client asks.",
            "Clients may wish for another time.",
            least=0,
            most=86_400,
            shown="N",
        ),
    ] = 30.0
    snapshot_runs: Annotated[
        int,
        Setting(
            "Commands of a durable session after which a snapshot is due before its time; 0: any number.",
            least=0,
            most=2**63 - 1,
            shown="N",
        ),
    ] = 0
    kept_state_size: Annotated[
        int,
        Setting(
            "Maximum host memory for the state of other daemons, which name this one with --state; 0: none.",
            "Their tokens need the right `pool`. The memory is not that of the devices: leave room for both.",
            least=0,
            most=2**63 - 1,
            kind="size",
            shown="SIZE",
        ),
    ] = 0
    kept_state_seconds: Annotated[
        float,
        Setting(
            "Seconds for which the state of a daemon that is gone is kept in memory, then it is forgotten.",
            least=1,
            most=30 * 86_400,
            shown="N",
        ),
    ] = 3600.0
    shared_memory: Annotated[
        bool,
        Setting(
            "Use shared memory for tensors, and a unix socket for commands, of clients on this host and of "
            "the same user.",
            section="listening",
        ),
    ] = True
    direct_connections: Annotated[
        int,
        Setting(
            "Port of TCP connections beside gRPC's, for commands and tensors; 0: any free one, -1: none.",
            "It is opened at the hosts that are listened at. A client that cannot reach it uses gRPC alone. "
            "None is opened where an address has TLS, since these connections have none.",
            least=-1,
            most=65_535,
            shown="PORT",
            section="listening",
        ),
    ] = 0
    ggml_rpc: Annotated[
        str,
        Setting(
            "Address of ggml's RPC protocol, by which llama.cpp uses the devices: HOST:PORT.",
            'It is plain TCP without credentials, so HOST is a loopback address, or `insecure` is set. "": '
            "none. See docs/guide/llama_cpp_clients.md.",
            shown="HOST:PORT",
            section="listening",
        ),
    ] = ""
    ggml_rpc_version: Annotated[
        str,
        Setting(
            "Version of that protocol; a client of another major version hangs up.",
            words=("8.0", "7.0"),
            section="listening",
        ),
    ] = "8.0"
    ggml_rpc_activations: Annotated[
        str,
        Setting(
            "Precision of rows in products with quantized weights for clients of that protocol.",
            '"q8" rounds them to q8_0, as ggml does, which is two to three times as fast on CPUs. "auto": q8 '
            "on CPUs, f32 elsewhere.",
            words=get_args(Activations),
            section="listening",
        ),
    ] = "auto"
    ggml_rpc_tenant: Annotated[
        str,
        Setting(
            "Tenant of all clients of that protocol, whose quota they share.",
            shown="NAME",
            section="listening",
        ),
    ] = "ggml-rpc"
    compression: Annotated[
        bool,
        Setting(
            "Let clients compress tensors and weights on slow links, where they measure that it pays.",
            "Needs Python 3.14 or the package backports.zstd on both sides for more than f32 weights that "
            "are exact in bf16.",
            section="listening",
        ),
    ] = True
    pool: Annotated[
        str,
        Setting(
            "Daemons whose devices are offered too, as HOST/DEVICE: static:HOST:PORT,NAME=HOST:PORT,... or "
            "dns:NAME:PORT for every address of a name.",
            "A graph can then run on several of them. Members may join and leave at any time.",
            shown="SOURCE",
            section="pool",
        ),
    ] = ""
    pool_peers: Annotated[
        tuple[str, ...],
        Setting(
            "Daemons that this one connects to when the head of a pool names them: HOST, HOST:PORT, a "
            "network such as 10.0.0.0/24, loopback, or * for all.",
            "Others are refused. Without any, callers with the right `pool` may name all. A daemon without "
            "tokens and client certificates then connects to loopback addresses if it listens at such alone, "
            "and otherwise to all but those. The members of its own pool need no entry.",
            shown="PEER",
            flag="--pool-peer",
            live=True,
        ),
    ] = ()
    pool_silence_seconds: Annotated[
        float,
        Setting(
            "Seconds of silence after which the connection to a member is broken.",
            "A member that was killed on a host that answers is lost at once.",
            least=0.25,
            most=3600,
            shown="N",
        ),
    ] = 3.0
    pool_lease_seconds: Annotated[
        float,
        Setting(
            "Seconds for which a member with a broken connection is waited for.",
            "The head connects again meanwhile, and work that needs the member waits; then the member is "
            "lost. 0 loses it at once. A member grants its own --lease at most. A member waits for "
            "another one as long, for values between them.",
            least=0,
            most=LONGEST_LEASE_SECONDS,
            shown="N",
        ),
    ] = 10.0
    lease: Annotated[
        float,
        Setting(
            "Longest time, in seconds, for which a session outlives a broken connection.",
            "Its work goes on meanwhile, and its client attaches again. 0 ends it at once.",
            least=0,
            most=LONGEST_LEASE_SECONDS,
            shown="SECONDS",
            section="sessions",
            live=True,
        ),
    ] = 60.0
    drain_seconds: Annotated[
        float,
        Setting(
            "Time limit for running work after SIGTERM, in seconds.",
            "A second signal ends it at once.",
            least=0,
            most=LONGEST_DRAIN_SECONDS,
            shown="N",
            section="shutdown and log",
            live=True,
        ),
    ] = 30.0
    limits: Annotated[
        Limits,
        Setting(
            "Limits of each session.",
            "The handshake sends them to the client.",
            flag="--limit",
            section="limits",
        ),
    ] = field(default_factory=Limits)
    quota: Annotated[
        Quota,
        Setting(
            "Limits of each tenant over all its sessions, unless its token has others; 0: no limit.",
            live=True,
        ),
    ] = field(default_factory=Quota)
    max_sessions: Annotated[
        int,
        Setting(
            "Maximum number of sessions of all tenants together.",
            least=1,
            most=2**20,
            shown="N",
        ),
    ] = 1000
    staging_size: Annotated[
        int,
        Setting(
            "Maximum host memory for transfers and data in flight of all tenants together; 0: an eighth of "
            "the machine's memory, but at least twice `limits.in_flight_bytes`.",
            "A tenant without a quota of its own for it may have half.",
            least=0,
            most=2**63 - 1,
            kind="size",
            shown="SIZE",
        ),
    ] = 0
    compile_seconds: Annotated[
        float,
        Setting(
            "Time limit of one compile, with the wait for its turn, in seconds.",
            "The timeout of the client ends it earlier.",
            least=1,
            most=86400,
            shown="N",
            live=True,
        ),
    ] = 600.0
    log_level: Annotated[
        str,
        Setting("Level of the log on stderr.", words=LEVELS, section="shutdown and log", live=True),
    ] = "info"
    log_format: Annotated[
        str,
        Setting("Format of the log: for people, or one JSON object a line.", words=("human", "json")),
    ] = "human"

    audit_log: Annotated[
        str,
        Setting(
            "File of the audit log: one JSON line for each action of an operator.",
            "It is opened again on SIGHUP, and renamed at 16 MiB; four older ones are kept. "
            '"" writes the lines to the log.',
            kind="path",
            shown="FILE",
        ),
    ] = ""

    def __post_init__(self) -> None:
        check_all(self)
        check_access(self)
        kept_elsewhere(self.state, self.addresses[0])  # mistakes show at once

    @property
    def addresses(self) -> tuple[Address, ...]:
        """`listen`, parsed."""
        return tuple(map(listen_address, self.listen))

    @property
    def state_elsewhere(self) -> KeptElsewhere | None:
        """The daemon that keeps the state, with the name; None if a folder does, or nothing."""
        return kept_elsewhere(self.state, self.addresses[0])

    @property
    def kserve_address(self) -> Address | None:
        """`kserve`, parsed; None without."""
        return listen_address(self.kserve) if self.kserve else None

    @property
    def kserve_http_address(self) -> Address | None:
        """`kserve_http`, parsed, with grpcs for https; None without."""
        return web_address(self.kserve_http, "kserve_http")

    @property
    def web_address(self) -> Address | None:
        """`web`, parsed, with grpcs for https; None without."""
        return web_address(self.web, "web")

    @property
    def gateways(self) -> tuple[Address, ...]:
        """The addresses for clients of other systems, which have access as those of `listen`."""
        found = (self.kserve_address, self.kserve_http_address)
        return tuple(one for one in found if one is not None)

    @property
    def exposed(self) -> tuple[Address, ...]:
        """All addresses at which callers are checked."""
        web = self.web_address
        return (*self.addresses, *self.gateways, *((web,) if web is not None else ()))


#: Advice for options of other servers.
FOREIGN_OPTIONS = {
    **dict.fromkeys(("--port", "-p"), "write --listen 127.0.0.1:PORT"),
    **dict.fromkeys(("--host", "--bind", "--address"), "write --listen HOST:PORT"),
    "--threads": "write --device cpu:threads=N",
    "--memory": "write --device cpu:memory=SIZE",
    "--gpu": "write --device cuda",
    "--debug": "write --log-level debug",
}


def unknown_option(word: str) -> ConfigurationError:
    """The error for an option that `heliograph serve` does not have."""
    option = word.partition("=")[0]
    advice = FOREIGN_OPTIONS.get(option) or suggest(
        option, ("--config", *sources.flags(ServerConfig)), sources.HELP
    )
    return ConfigurationError(f"unknown option {word!r:.200}", advice=advice)


@dataclass(frozen=True, slots=True)
class Sources:
    """The sources of a configuration: a file, which may change, and values that override it, by
    key."""

    path: Path | None = None
    above: Mapping[str, Any] = field(default_factory=dict)

    def load(self) -> ServerConfig:
        """Read the configuration. Raises ConfigurationError."""
        return self.parse(b"" if self.path is None else sources.read_file(self.path))

    def parse(self, content: bytes) -> ServerConfig:
        """Return the configuration for this content of the file. Raises ConfigurationError."""
        values = sources.of_file(ServerConfig, content, self.path) if self.path is not None else {}
        return sources.built(ServerConfig, {**values, **self.above})


def load_config(path: Path | None = None, above: Mapping[str, Any] | None = None) -> ServerConfig:
    """Read a configuration from a TOML file, if any, and values that override it, by key.

    Raises ConfigurationError.
    """
    return Sources(path, above or {}).load()


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `heliograph serve`."""
    parser.usage, parser.epilog = "%(prog)s [OPTION ...]", EPILOG
    help_text = f"configuration file; options override it (default: ${CONFIG_VARIABLE})"
    parser.add_argument("--config", type=Path, metavar="FILE.toml", help=help_text)
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print the settings of the file, the variables and these options as a commented file, and exit; "
        "checks names and values, and reads no file that a setting names",
    )
    sources.add_flags(ServerConfig, parser)


def sources_from_arguments(
    arguments: argparse.Namespace, environment: Mapping[str, str] = os.environ
) -> Sources:
    """Return the sources of a command line and an environment. Raises ConfigurationError."""
    named = environment.get(CONFIG_VARIABLE)
    path: Path | None = arguments.config or (Path(named) if named else None)
    above = sources.of_environment(ServerConfig, environment, OTHER_VARIABLES)
    return Sources(path, above | sources.of_flags(ServerConfig, arguments))


def config_from_arguments(
    arguments: argparse.Namespace, environment: Mapping[str, str] = os.environ
) -> ServerConfig:
    """Return the configuration of a command line and an environment. Raises ConfigurationError."""
    return sources_from_arguments(arguments, environment).load()


def as_file(config: ServerConfig) -> str:
    """The configuration as a commented file, which `--config` reads."""
    return example.as_file(config, HEADING)
