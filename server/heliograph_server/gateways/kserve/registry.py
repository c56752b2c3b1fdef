"""All models of the folder: loaded, unloaded and reloaded, at the start, by calls, and when files
change.

Everything here is of the event loop, but reading folders, loading and closing, which block and so
run on threads.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import TypeVar

from heliograph_proto.errors import (
    DrainingError,
    HeliographError,
    InvalidInputError,
    InvalidModelError,
    UnavailableError,
    UnknownHandleError,
)
from heliograph_server.gateways.kserve.loaded import LoadedModel
from heliograph_server.gateways.kserve.models import AnyModel, open_model
from heliograph_server.gateways.kserve.repository import FILES, ModelFolder, ModelSettings, Repository, Stamp
from heliograph_server.inprocess.sessions import ModelSessions
from heliograph_server.resources.failures import typed
from heliograph_server.resources.principals import Principal, Right
from heliograph_server.runtime.host_slot import HostSlot
from heliograph_server.telemetry.telemetry import ModelFigures

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: The tenant that the sessions of models belong to.
TENANT = "kserve"
#: Threads that read the folder, and load and close models.
THREADS = 2
#: How often the folder is looked at.
WATCH_SECONDS = 2.0


class State(StrEnum):
    """The state of a version of a model, in the protocol's words."""

    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


@dataclass(slots=True)
class Entry:
    """A version of a model, loaded or not."""

    state: State = State.LOADING
    #: Why it is not ready, or why its latest files are not in use.
    reason: str = ""
    model: LoadedModel | None = None

    def fail(self, error: HeliographError) -> None:
        """Record that it could not be loaded. A model that was loaded before goes on."""
        self.state = State.READY if self.model is not None else State.UNAVAILABLE
        self.reason = error.message


@dataclass(slots=True)
class _Known:
    """A model of the folder, or one that was there: then it has no entries."""

    entries: dict[str, Entry] = field(default_factory=dict)
    #: The files when it was last loaded or unloaded, and at the last look.
    stamp: Stamp = ()
    seen: Stamp = ()
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)


class Models:
    """The models of a folder. Lives on one event loop."""

    def __init__(self, repository: Repository, slot: HostSlot) -> None:
        self._repository, self._slot = repository, slot
        self._known: dict[str, _Known] = {}
        self._threads = ThreadPoolExecutor(THREADS, "heliograph-models")
        # Models that have weights in common share them.
        self._secret = secrets.token_bytes(16)
        self._starting: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to load all models, and to watch the folder. The host has its devices."""
        self._starting = asyncio.create_task(self._load_all())
        self._watching = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """Unload all models. Idempotent."""
        tasks = [one for one in (self._watching, self._starting) if one is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # A load in progress may add some.
        for known in tuple(self._known.values()):
            for entry in tuple(known.entries.values()):
                await self._unload_entry(entry)
        self._threads.shutdown(wait=False)

    @property
    def is_ready(self) -> bool:
        """True if requests are taken, and the models of the folder were loaded once."""
        is_loaded = self._starting is not None and self._starting.done()
        return is_loaded and self._slot.is_filled and self._slot.host.is_accepting

    # Requests

    def find(self, name: str, version: str = "") -> LoadedModel:
        """Return a model; its latest loaded version if none is given.

        Raises UnknownHandleError, and UnavailableError for one that is not ready.
        """
        entries = self._entries(name)
        _check_version(name, version, entries)
        wanted = [version] if version else sorted(entries, key=_number, reverse=True)
        for one in wanted:
            entry = entries[one]
            if entry.model is not None and entry.state is not State.UNLOADING:
                return entry.model
        entry = entries[wanted[0]]
        state = entry.state.lower()
        raise UnavailableError(
            f"the model {name!r:.80} is {state}" + (f": {entry.reason}" if entry.reason else ""),
            advice="the repository's index has the states of all models",
        )

    def _entries(self, name: str) -> dict[str, Entry]:
        known = self._known.get(name)
        if known is None or not known.entries:
            raise UnknownHandleError(
                f"there is no model {name!r:.80}", advice="the repository's index has the names"
            )
        return known.entries

    def admit(self) -> None:
        """Check that requests are taken. Raises DrainingError, UnavailableError."""
        if self._slot.host.is_draining:
            raise DrainingError("the server is draining and takes no new requests", advice="try elsewhere")

    def is_model_ready(self, name: str, version: str) -> bool:
        """Return whether a model takes requests. Raises UnknownHandleError."""
        try:
            return not self.find(name, version).is_lost
        except UnavailableError:
            return False

    def index(self) -> Iterator[tuple[str, str, Entry]]:
        """Yield the name, version and entry of each model, by name and version."""
        for name, known in sorted(self._known.items()):
            for version in sorted(known.entries, key=_number):
                yield name, version, known.entries[version]

    def loaded(self, name: str = "", version: str = "") -> list[LoadedModel]:
        """Return the loaded models of a name and version, or of all. Raises UnknownHandleError."""
        if name:
            _check_version(name, version, self._entries(name))
        return [
            entry.model
            for one, number, entry in self.index()
            if entry.model is not None and name in ("", one) and version in ("", number)
        ]

    def figures(self) -> list[ModelFigures]:
        """Return the figures of the loaded models. Any thread may call it."""
        entries = [entry for known in tuple(self._known.values()) for entry in tuple(known.entries.values())]
        models = [model for entry in entries if (model := entry.model) is not None]
        return [one.statistics.figures(one.name, one.version, one.waiting) for one in models]

    # Loading

    async def load(self, name: str) -> None:
        """Load a model from its files, in place of what is loaded of it.

        A version that cannot be loaded leaves the one before in use. Raises UnknownHandleError if
        there is none, and the first error of a version.
        """
        found = await self._blocking(partial(self._repository.find, name))
        if found is None:
            raise UnknownHandleError(
                f"the folder has no model {name!r:.80}",
                advice=f"it needs NAME/1/ with {', '.join(FILES.values())}",
            )
        known = self._known.setdefault(name, _Known())
        async with known.changing:
            known.stamp = known.seen = found.stamp
            error = await self._load_versions(known, found)
        if error is not None:
            raise error

    async def _load_versions(self, known: _Known, found: ModelFolder) -> HeliographError | None:
        """Load the wanted versions and unload the others. Returns the first error."""
        try:
            settings = await self._blocking(partial(self._repository.settings, found.name))
            wanted = found.wanted(settings)
        except InvalidModelError as error:
            logger.warning("the model %s is not loaded: %s", found.name, error.in_a_line())
            for version in (*known.entries,) or tuple(found.versions)[-1:] or ("",):
                known.entries.setdefault(version, Entry()).fail(error)
            return error
        first: HeliographError | None = None
        for version in wanted:
            first = await self._load_version(known, found, version, settings) or first
        for version in [one for one in known.entries if one not in wanted]:
            await self._unload_entry(known.entries[version])
            del known.entries[version]
        return first

    async def _load_version(
        self, known: _Known, found: ModelFolder, version: str, settings: ModelSettings
    ) -> HeliographError | None:
        entry = known.entries.setdefault(version, Entry())
        if entry.model is None:
            entry.state, entry.reason = State.LOADING, ""
        try:
            opened = await self._blocking(partial(self._open, found, version, settings))
        except HeliographError as error:
            logger.warning("version %s of %s is not loaded: %s", version, found.name, error.in_a_line())
            entry.fail(error)
            return error
        another = partial(self._open, found, version, settings)
        before, entry.model = entry.model, LoadedModel(found.name, version, opened, settings, another)
        entry.state, entry.reason = State.READY, ""
        logger.info("version %s of the model %s is loaded", version, found.name)
        if before is not None:
            await before.close()
        return None

    def _open(self, found: ModelFolder, version: str, settings: ModelSettings) -> AnyModel:
        """Load a version in a session of its own. Raises HeliographError."""
        principal = Principal(TENANT, frozenset((Right.USE,)), shown=TENANT, is_daemon=True)
        client = f"kserve {found.name} {version}"
        sessions = ModelSessions(self._slot.host, client, principal, self._secret)
        try:
            return open_model(sessions, found.versions[version], settings)
        except BaseException as error:
            refused = typed(error, f"loading the model {found.name}").anew()
            refused.message = self._repository.shown(refused.message)
            raise refused from None

    async def unload(self, name: str) -> None:
        """Unload all versions of a model, once the requests that wait are answered. Raises
        UnknownHandleError."""
        self._entries(name)
        known = self._known[name]
        async with known.changing:
            for entry in known.entries.values():
                await self._unload_entry(entry)

    async def _unload_entry(self, entry: Entry) -> None:
        model = entry.model
        if model is None:
            return
        entry.state, entry.reason = State.UNLOADING, ""
        await model.close()
        entry.model, entry.state, entry.reason = None, State.UNAVAILABLE, "unloaded"
        logger.info("version %s of the model %s is unloaded", model.version, model.name)

    # Changes of files

    async def _load_all(self) -> None:
        try:
            names = await self._blocking(self._repository.names)
        except HeliographError as error:
            logger.warning("no model is loaded: %s", error.in_a_line())
            return
        for name in names:
            await self._load_quietly(name)

    async def _load_quietly(self, name: str) -> None:
        """Load a model; the log and the index tell of errors."""
        try:
            await self.load(name)
        except HeliographError:
            pass
        except Exception as error:
            # Logged here; it must not keep others from being loaded.
            typed(error, f"loading the model {name}")

    async def _watch(self) -> None:
        logged = ""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            why = ""
            if self._starting is None or not self._starting.done():
                continue
            try:
                for model in self.loaded():
                    await model.end_idle()
                await self._look()
            except Exception as error:
                why = typed(error, "looking for changed models").in_a_line()
            if why not in ("", logged):
                logger.warning("changed models are not seen: %s", why)
            logged = why

    async def _look(self) -> None:
        """Load models whose files have changed and are still, and unload those that are gone."""
        folders = await self._blocking(self._folders)
        for name, found in folders.items():
            known = self._known.get(name)
            if known is None:
                self._known[name] = _Known(seen=found.stamp)
            elif known.stamp != found.stamp and known.seen == found.stamp:
                await self._load_quietly(name)
            elif any(entry.model is not None and entry.model.is_lost for entry in known.entries.values()):
                await self._load_lost(name)
            else:
                known.seen = found.stamp
        for name in self._known.keys() - folders.keys():
            await self._forget(name)

    async def _forget(self, name: str) -> None:
        """Unload a model if its files are gone. They may be there again, and loaded by a call."""
        known = self._known[name]
        async with known.changing:
            if await self._blocking(partial(self._repository.find, name)) is None:
                for entry in known.entries.values():
                    await self._unload_entry(entry)
                known.entries.clear()
                known.stamp = known.seen = ()

    async def _load_lost(self, name: str) -> None:
        """Load a model again whose session has ended, as when a device was lost. Tried once."""
        await self.unload(name)
        logger.warning("the session of the model %s has ended; it is loaded again", name)
        await self._load_quietly(name)

    def _folders(self) -> Mapping[str, ModelFolder]:
        found = map(self._repository.find, self._repository.names())
        return {one.name: one for one in found if one is not None}

    async def _blocking(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)


def _check_version(name: str, version: str, entries: Mapping[str, Entry]) -> None:
    """Raises UnknownHandleError for a version that a model does not have; "" is any."""
    if version and version not in entries:
        loaded = ", ".join(one for one, entry in entries.items() if entry.model) or "none"
        raise UnknownHandleError(
            f"the model {name!r:.80} has no version {version!r:.40}", advice=f"versions: {loaded}"
        )


def _number(version: str) -> int:
    # A model without a version has an entry "", for its reason.
    return int(version or 0)


def check_parameters(names: Mapping[str, object], known: frozenset[str] = frozenset()) -> None:
    """Check the parameters of a load or unload. Raises InvalidInputError."""
    if unknown := sorted(names.keys() - known):
        raise InvalidInputError(
            f"the parameter {unknown[0]!r:.80} is not taken",
            advice="a model is what its folder has: change its files and load it again",
        )
