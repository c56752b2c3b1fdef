"""The folder of models: NAME/VERSION/ with model.onnx, model.hgraph, model.gguf or the parts of a
split one, and NAME/model.toml beside the versions.

Reads names, settings and the state of files; what a model's file holds is for `models`.
"""

from __future__ import annotations

import errno
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from heliograph_proto.devices import Activations
from heliograph_proto.errors import InvalidArgumentError, InvalidModelError, UnavailableError
from heliograph_proto.gguf import part_name
from heliograph_server.gateways.kserve.batching import BatchPolicy

#: The names of a version's file, by the platform that runs it.
FILES = {"onnx": "model.onnx", "hgraph": "model.hgraph", "gguf": "model.gguf"}
SETTINGS = "model.toml"
MOST_MODELS = 1000
#: The most versions of a model in the folder, and of those the most that are loaded.
MOST_VERSIONS, MOST_LOADED = 100, 16
MOST_NAME = 200
MOST_SETTINGS_BYTES = 2**16
MOST_INSTANCES = 16
#: The most rows of a run, and its default for models that take any.
MOST_ROWS, DEFAULT_ROWS = 1024, 32
MOST_SIZES = 16
MOST_WAITING = 100_000
MOST_PRIORITIES = 100
MOST_WINDOW_MS = 10_000
#: The most sequences of a model, and the longest that one may be without a request.
MOST_SEQUENCES, MOST_IDLE_SECONDS = 32, 86_400
#: The most tokens of a language model's context, and of its cache.
MOST_TOKENS = 2**30
#: The tasks of language models.
TASKS = ("embed", "generate")
#: Errors that say nothing of the folder: too many open files, too little memory, a lost disk.
_PASSING = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.ESTALE))
#: A file by its name, and what tells that it changed.
Stamp = tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """The settings of `model.toml`."""

    #: The versions to load; () is the latest.
    versions: tuple[str, ...] = ()
    #: The most rows of a run; 0: requests share none; None: as the model allows.
    max_batch_size: int | None = None
    #: The rows of the plans; (): powers of two up to the most rows.
    batch_sizes: tuple[int, ...] = ()
    window_ms: float = 1.0
    max_queue: int = 1024
    priorities: int = 1
    default_priority: int = 1
    #: How many runs may be in progress.
    instances: int = 1
    #: The names of the devices, as `devices` of `session.compile`; () is the default.
    devices: tuple[str, ...] = ()
    #: The sequences that may be in progress, each with a session of its own; 0: the model has none.
    sequences: int = 0
    #: A sequence without a request ends after this time.
    sequence_idle_seconds: float = 60.0
    #: One of TASKS; "": the model's own.
    task: str = ""
    #: The most tokens of a prompt with its answer, and of all answers' cache; 0: the defaults.
    context: int = 0
    cache_tokens: int = 0
    #: The precision of rows in products with quantized weights, as of `hg.llm.load`; "": the default.
    activations: str = ""
    #: Shapes of inputs without the batch, by name, for which plans are made before the model is
    #: ready.
    warm_up: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def sizes(self, most_rows: int) -> tuple[int, ...]:
        """Return the rows of the plans for runs of so many rows at most."""
        if not most_rows:
            return ()
        powers = (2**power for power in range(most_rows.bit_length()))
        return tuple(sorted({*(self.batch_sizes or powers), most_rows}))

    @property
    def loading(self) -> dict[str, Any]:
        """The arguments of `hg.llm.load` that are set."""
        given = {"context": self.context, "activations": self.activations, "devices": list(self.devices)}
        return {name: value for name, value in given.items() if value}

    def policy(self, most_rows: int) -> BatchPolicy:
        """Return the rules of the queue."""
        return BatchPolicy(
            self.sizes(most_rows),
            self.window_ms / 1e3,
            self.max_queue,
            self.priorities,
            self.default_priority,
        )


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model in the folder."""

    name: str
    #: The file of each version, by version.
    versions: Mapping[str, Path]
    stamp: Stamp

    def wanted(self, settings: ModelSettings) -> tuple[str, ...]:
        """Return the versions to load. Raises InvalidModelError."""
        if not self.versions:
            raise InvalidModelError(
                f"the model {self.name!r} has no version",
                advice=f"its folder has folders 1, 2 and so on, each with one of {', '.join(FILES.values())}",
            )
        if missing := [one for one in settings.versions if one not in self.versions]:
            raise InvalidModelError(
                f"the model {self.name!r} has no version {missing[0]}",
                advice=f"versions: {', '.join(self.versions)}",
            )
        return settings.versions or (max(self.versions, key=int),)


class Repository:
    """The folder of models. Its methods read it, and block."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder).resolve()

    def names(self) -> list[str]:
        """Return the names of models: of folders with a version or settings. Raises
        UnavailableError if the folder cannot be read."""
        try:
            found = sorted(os.listdir(self.folder))
        except OSError as error:
            raise _unreadable(error) from None
        return [name for name in found if _is_name(name) and self._is_model(name)][:MOST_MODELS]

    def _is_model(self, name: str) -> bool:
        folder = self.folder / name
        return os.path.isfile(folder / SETTINGS) or bool(_versions(folder))

    def find(self, name: str) -> ModelFolder | None:
        """Return a model; None if the folder has none of this name. Raises UnavailableError."""
        if not _is_name(name) or not self._is_model(name):
            return None
        folder = self.folder / name
        if not folder.resolve().is_relative_to(self.folder):
            return None
        return ModelFolder(name, _versions(folder), _stamp(folder))

    def shown(self, text: str) -> str:
        """Return a text for clients, in which paths begin at the folder."""
        return text.replace(f"{self.folder}{os.sep}", "")

    def settings(self, name: str) -> ModelSettings:
        """Read the settings of a model. Raises InvalidModelError."""
        path = self.folder / name / SETTINGS
        shown = f"{name}/{SETTINGS}"
        if not os.path.exists(path):
            return ModelSettings()
        try:
            with path.open("rb") as file:
                data = file.read(MOST_SETTINGS_BYTES + 1)
            if len(data) > MOST_SETTINGS_BYTES:
                raise InvalidModelError(f"{shown} is larger than {MOST_SETTINGS_BYTES:,} bytes")
            return settings_of(tomllib.loads(data.decode()))
        except OSError as error:
            raise InvalidModelError(f"cannot read {shown}: {error.strerror}") from None
        except InvalidArgumentError as error:
            raise InvalidModelError(f"{shown}: {error.message}", advice=error.advice) from None
        except (ValueError, RecursionError) as error:
            raise InvalidModelError(f"{shown} is not TOML: {error}") from None


def _is_name(name: str) -> bool:
    is_plain = 0 < len(name) <= MOST_NAME and name.isprintable() and not name.startswith(".")
    return is_plain and "/" not in name and "\\" not in name


def _versions(folder: Path) -> dict[str, Path]:
    """The file of each version in a model's folder, by version, rising."""
    found: dict[str, Path] = {}
    names = _names_in(folder)
    numbers = [one for one in names if one.isascii() and one.isdecimal() and one[0] != "0" and len(one) < 10]
    for version in sorted(numbers, key=int)[-MOST_VERSIONS:]:
        names = [*FILES.values(), *sorted(filter(_is_first_part, _names_in(folder / version)))]
        paths = (folder / version / name for name in names)
        if path := next(filter(os.path.isfile, paths), None):
            found[version] = path
    return found


def _is_first_part(name: str) -> bool:
    """True for the first of the files that a GGUF model was split into."""
    part = part_name(name)
    return part is not None and part.number == 0 and f"{part.stem}.gguf" == FILES["gguf"]


def platform_of(path: Path) -> str:
    """Return the platform that runs a version's file."""
    return path.suffix.removeprefix(".")


def _names_in(folder: Path) -> list[str]:
    """The names in a folder; none if it is gone or closed. Raises UnavailableError."""
    try:
        return os.listdir(folder)
    except OSError as error:
        if error.errno in _PASSING:
            raise _unreadable(error) from None
        return []


def _unreadable(error: OSError) -> UnavailableError:
    return UnavailableError(f"cannot read the folder of models: {error.strerror}", advice="try again")


def _stamp(folder: Path) -> Stamp:
    """The names, sizes and times of a model's files."""
    found = []
    paths = [folder / SETTINGS]
    for path in _versions(folder).values():
        paths += (path.parent / name for name in _names_in(path.parent))
    for path in paths:
        try:
            state = path.stat()
        except OSError:
            continue
        name = path.relative_to(folder).as_posix()
        found.append((name, state.st_ino, state.st_size, state.st_mtime_ns))
    return tuple(sorted(found))


def settings_of(table: Mapping[str, Any]) -> ModelSettings:
    """Return the settings of a parsed `model.toml`. Raises InvalidArgumentError."""
    if unknown := sorted(table.keys() - _READERS.keys()):
        raise InvalidArgumentError(
            f"unknown key {unknown[0]!r:.80}", advice=f"keys: {', '.join(sorted(_READERS))}"
        )
    found = ModelSettings(**{key: _READERS[key](key, value) for key, value in table.items()})
    if found.default_priority > found.priorities:
        raise InvalidArgumentError("default_priority is beyond priorities")
    if found.batch_sizes and found.max_batch_size is None:
        raise InvalidArgumentError(
            "batch_sizes are the rows of plans up to max_batch_size, which is missing",
            advice=f"max_batch_size = {max(found.batch_sizes)}",
        )
    if found.sequences and found.max_batch_size:
        raise InvalidArgumentError(
            "requests of sequences share no runs, and max_batch_size is set", advice="leave one of them out"
        )
    if any(size > (found.max_batch_size or 0) for size in found.batch_sizes):
        raise InvalidArgumentError("one of batch_sizes is beyond max_batch_size")
    return found


def _integer(least: int, most: int) -> Any:
    def read(key: str, value: Any) -> int:
        if type(value) is not int or not least <= value <= most:
            raise InvalidArgumentError(f"{key} is {value!r:.80}", advice=f"a number from {least} to {most:,}")
        return value

    return read


def _number(least: int, most: int, unit: str) -> Any:
    def read(key: str, value: Any) -> float:
        if type(value) not in (int, float) or not least <= value <= most:
            raise InvalidArgumentError(f"{key} is {value!r:.80}", advice=f"{least} to {most:,} {unit}")
        return float(value)

    return read


def _rows(key: str, value: Any) -> tuple[int, ...]:
    is_list = isinstance(value, list) and 0 < len(value) <= MOST_SIZES
    if not is_list or not all(type(one) is int and 0 < one <= MOST_ROWS for one in value):
        raise InvalidArgumentError(f"{key} is {value!r:.80}", advice=f"1 to {MOST_SIZES} numbers of rows")
    return tuple(sorted(set(value)))


def _numbers(key: str, value: Any) -> tuple[str, ...]:
    is_list = isinstance(value, list) and 0 < len(value) <= MOST_LOADED
    if not is_list or not all(type(one) is int and one > 0 for one in value):
        raise InvalidArgumentError(f"{key} is {value!r:.80}", advice=f"1 to {MOST_LOADED} versions: [1, 2]")
    return tuple(map(str, sorted(set(value))))


def _names(key: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise InvalidArgumentError(f"{key} is {value!r:.80}", advice='names of devices: ["cpu"]')
    return tuple(value)


def _word(*known: str) -> Any:
    def read(key: str, value: Any) -> str:
        if value not in known:
            raise InvalidArgumentError(f"{key} is {value!r:.80}", advice=" or ".join(map(repr, known)))
        return str(value)

    return read


def _shapes(key: str, value: Any) -> dict[str, tuple[int, ...]]:
    is_table = isinstance(value, dict) and all(
        isinstance(shape, list) and all(type(one) is int and one >= 0 for one in shape)
        for shape in value.values()
    )
    if not is_table:
        raise InvalidArgumentError(
            f"{key} is {value!r:.80}", advice="shapes by input, without the batch: {x = [128]}"
        )
    return {name: tuple(shape) for name, shape in value.items()}


_READERS: dict[str, Any] = {
    "versions": _numbers,
    "max_batch_size": _integer(0, MOST_ROWS),
    "batch_sizes": _rows,
    "window_ms": _number(0, MOST_WINDOW_MS, "milliseconds"),
    "max_queue": _integer(1, MOST_WAITING),
    "priorities": _integer(1, MOST_PRIORITIES),
    "default_priority": _integer(1, MOST_PRIORITIES),
    "instances": _integer(1, MOST_INSTANCES),
    "devices": _names,
    "sequences": _integer(0, MOST_SEQUENCES),
    "sequence_idle_seconds": _number(1, MOST_IDLE_SECONDS, "seconds"),
    "task": _word(*TASKS),
    "context": _integer(1, MOST_TOKENS),
    "cache_tokens": _integer(1, MOST_TOKENS),
    "activations": _word(*get_args(Activations)),
    "warm_up": _shapes,
}
