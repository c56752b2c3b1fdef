"""`heliograph llm-serve`: OpenAI's HTTP interface in front of a language model."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import logging
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

import heliograph as hg
from heliograph._base.reopening import REOPEN_SECONDS
from heliograph.cli.common.language_models import (
    add_loading_arguments,
    plain_name,
    scaled,
    served_model,
    text_of,
    wanted_draft,
)
from heliograph.cli.common.placement import model_placing
from heliograph.llm.serving import Bounds, Server
from heliograph.llm.serving.engine import SECONDS
from heliograph.llm.serving.http import HttpSettings, make_app
from heliograph.llm.serving.scheduler import SIZES, WHOLE_CONTEXTS
from heliograph.llm.speculating import LOOKUP
from heliograph_proto.errors import ConfigurationError, PermissionDeniedError
from heliograph_proto.sessions import Quota
from heliograph_server.auth.tokens import TokenFile
from heliograph_server.http.connections import MOST_HEAD, Connection
from heliograph_server.http.server import listen
from heliograph_server.resources.principals import Right

logger = logging.getLogger(__name__)

#: The time in which clients are told that their answers have ended, after --drain.
LAST_SECONDS = 5
#: The wait between two looks at whether the command ends.
TICK_SECONDS = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add MODEL, --server, and those of the model and of the HTTP server."""
    add_loading_arguments(
        parser,
        ". Each is a model for clients, named as its file without .gguf",
        ". It does so for an answer that is the only one in progress",
    )
    parser.add_argument("--name", help="the model's name for clients (default: the file's, without .gguf)")
    parser.add_argument(
        "--answers", type=int, metavar="N", default=Bounds().answers,
        help=f"answers at a time, 1 to {SIZES[-1]} (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--cache-tokens", type=int, metavar="N",
        help="tokens of all answers, and of prompts that are kept for later ones, whose keys and values "
        f"the cache has (default: {WHOLE_CONTEXTS} times the context)",
    )  # fmt: skip
    parser.add_argument("--chat-template", type=Path, metavar="FILE", help="template in place of the model's")
    group = parser.add_argument_group("requests")
    group.add_argument(
        "--listen", metavar="HOST:PORT", default="127.0.0.1:8080", help="address (default: %(default)s)"
    )
    group.add_argument(
        "--queue", type=int, metavar="N", default=Bounds().queue,
        help="requests that wait; more are refused with 429 (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--timeout", type=float, metavar="SECONDS", default=SECONDS,
        help="the most time of an answer, its wait included (default: %(default)g)",
    )  # fmt: skip
    group.add_argument(
        "--drain", type=int, metavar="SECONDS", default=30,
        help="time for the answers in progress after SIGTERM (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--reconnect", type=float, metavar="SECONDS", default=REOPEN_SECONDS,
        help="how long answers wait for a daemon that is lost, and then go on (default: %(default)g; 0: "
        "they end)",
    )  # fmt: skip
    group.add_argument(
        "--token-file", metavar="FILE", help="tokens of callers: heliograph token new --file FILE"
    )
    group.add_argument("--tls-certificate", metavar="FILE", help="PEM file: answer https://")
    group.add_argument("--tls-key", metavar="FILE", help="PEM file of its key")
    group.add_argument(
        "--insecure", action="store_true", help="listen beyond loopback without TLS: the network is trusted"
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT. Raises the errors of the model's loading."""
    host, port = parse_address(arguments.listen)
    check(arguments, host)
    return asyncio.run(_serve(arguments, host, port))


def parse_address(text: str) -> tuple[str, int]:
    """Return the host and port of HOST:PORT. Raises ConfigurationError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigurationError(f"--listen is {text!r:.80}", advice="give HOST:PORT, as 127.0.0.1:8080")
    return host.removeprefix("[").removesuffix("]"), int(port)


def check(arguments: argparse.Namespace, host: str) -> None:
    """Check what depends on one another. Raises ConfigurationError."""
    for name in ("queue", "timeout", "drain", "reconnect"):
        if not getattr(arguments, name) >= 0:
            raise ConfigurationError(f"--{name} is {getattr(arguments, name)}", advice="a number from 0 on")
    if bool(arguments.tls_certificate) != bool(arguments.tls_key):
        raise ConfigurationError("--tls-certificate and --tls-key go together", advice="give both PEM files")
    is_loopback = host == "localhost"
    with suppress(ValueError):
        is_loopback = ipaddress.ip_address(host).is_loopback
    if is_loopback or arguments.insecure:
        return
    if not arguments.tls_certificate:
        raise ConfigurationError(
            f"prompts and answers would go in plain text to {host}",
            advice="give --tls-certificate and --tls-key, or --insecure if the network is trusted",
        )
    if not arguments.token_file:
        raise ConfigurationError(
            f"every host that reaches {host} could use the model",
            advice="give --token-file, or --insecure if the network is trusted",
        )


def tenants(path: str | None) -> Callable[[str], str]:
    """Return what finds the tenant of a token. Raises ConfigurationError."""
    if path is None:
        return lambda _: ""
    tokens = TokenFile(path)

    def authenticate(token: str) -> str:
        found = tokens.identify(token, Quota())
        if not found.may(Right.USE):
            raise PermissionDeniedError(
                f"the token {found.shown!r} lacks the right 'use'", advice="ask the operator for another"
            )
        return found.tenant

    return authenticate


async def _serve(arguments: argparse.Namespace, host: str, port: int) -> int:
    failures: list[BaseException] = []
    authenticate = tenants(arguments.token_file)
    try:
        listening = listen(host, port)
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen at {host}:{port}: {error.strerror}", advice="choose another --listen"
        ) from None
    with listening:
        scheme = "https" if arguments.tls_certificate else "http"
        shown = f"[{host}]" if ":" in host else host
        url = f"{scheme}://{shown}:{listening.getsockname()[1]}/v1"

        def fail(error: BaseException) -> None:
            failures.append(error)
            server.should_exit = True

        def is_ending() -> bool:
            return server.should_exit

        name = arguments.name or plain_name(arguments.model)
        settings = HttpSettings(name, authenticate, arguments.timeout, fail)
        server = uvicorn.Server(
            uvicorn.Config(
                make_app(partial(_opened, arguments, name, url, is_ending), settings),
                http=Connection,
                ws="none",
                h11_max_incomplete_event_size=MOST_HEAD,
                log_config=None,
                access_log=False,
                server_header=False,
                ssl_certfile=arguments.tls_certificate,
                ssl_keyfile=arguments.tls_key,
                timeout_graceful_shutdown=arguments.drain + LAST_SECONDS,
            )
        )
        # uvicorn raises the signal that ended it once more, which is no error here.
        for one in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(one, lambda: None)
        await server.serve(sockets=[listening])
    if failures:
        raise failures[0]
    return 0


async def _file_of(session: hg.aio.Session, name: str) -> Any:
    """Return a file here, else one of the server's. Raises as `served_model`."""
    is_here = Path(name).exists()  # noqa: ASYNC240 - before the first request
    return name if is_here else await session.server_weights(served_model(name, await session.models()))


@asynccontextmanager
async def _opened(
    arguments: argparse.Namespace, name: str, url: str, is_ending: Callable[[], bool]
) -> AsyncIterator[Server]:
    """Load the model, say so, and close it at the end."""
    template = arguments.chat_template and text_of(arguments.chat_template)
    adapters: Any = list(map(scaled, arguments.lora))
    async with hg.aio.connect(arguments.server, reconnect=arguments.reconnect) as session:
        file = await _file_of(session, arguments.model)
        adapters = [hg.llm.Adapter(await _file_of(session, one), scale) for one, scale in adapters]
        draft: Any = wanted_draft(arguments)
        if draft is not None:
            named = draft if draft == LOOKUP else await _file_of(session, draft)
            draft = hg.llm.Draft(named, arguments.draft_tokens)
        server = await Server.load(
            session,
            file,
            bounds=Bounds(arguments.answers, arguments.queue, arguments.cache_tokens),
            context=arguments.context,
            cache=arguments.cache,
            activations=arguments.activations,
            chat_template=template,
            adapters=adapters,
            draft=draft,
            **model_placing(arguments, session),
        )
        stopping = asyncio.create_task(_stop_late(server, is_ending, arguments.drain))
        try:
            print(f"serving {name} at {url}", flush=True)
            yield server
        finally:
            stopping.cancel()
            await asyncio.gather(stopping, return_exceptions=True)
            await server.close()


async def _stop_late(server: Server, is_ending: Callable[[], bool], seconds: float) -> None:
    """End the answers that are in progress so long after the command was told to end."""
    while not is_ending():  # noqa: ASYNC110 - uvicorn has a flag, and no event
        await asyncio.sleep(TICK_SECONDS)
    await asyncio.sleep(seconds)
    server.stop()
