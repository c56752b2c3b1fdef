"""The protocol over HTTP: JSON, and its extension with elements as bytes behind the JSON."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from reprlib import repr as short
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from heliograph_proto import __version__
from heliograph_proto.codec import paced_json
from heliograph_proto.errors import HeliographError, InvalidInputError, UnsupportedError
from heliograph_server.gateways.kserve import descriptions, prompts, tensors
from heliograph_server.gateways.kserve.loaded import Answer, LoadedModel
from heliograph_server.gateways.kserve.registry import Models, State, check_parameters
from heliograph_server.gateways.kserve.requests import (
    InferOptions,
    RegionPart,
    options_of,
    region_of,
    text_of,
)
from heliograph_server.gateways.kserve.shared_regions import SharedRegions
from heliograph_server.http.requests import read_body, status_of
from heliograph_server.resources.principals import current_principal
from heliograph_server.rpc.errors import refusal_of
from heliograph_server.runtime.host_slot import HeldBytes, HostSlot

#: The header with the size of the JSON of a body that has bytes behind it.
JSON_SIZE = "inference-header-content-length"
#: The memory that JSON takes for each of its bytes: an element has four or more there, and 32 here.
JSON_GROWTH = 8

#: Checks the caller of a request, by its header and the name of gRPC's method for the same. Raises
#: UnauthenticatedError, PermissionDeniedError.
Admit = Callable[[str | None, str], None]
T = TypeVar("T")
#: Reads a part of a region of the caller's.
Read = Callable[[RegionPart], bytearray]
Endpoint = Callable[["RestService", Request], Awaitable[Response]]


@dataclass(slots=True)
class _Body:
    """A request: its JSON, and the bytes behind it."""

    table: dict[str, Any]
    data: memoryview
    #: True if its JSON is decoded in little time.
    is_small: bool
    taken: int = 0

    def take(self, size: int) -> memoryview:
        """Take the bytes of the next input. Raises InvalidInputError."""
        if size > len(self.data) - self.taken:
            raise InvalidInputError(
                f"binary_data_size is {size:,}, and {len(self.data) - self.taken:,} bytes are left"
            )
        self.taken += size
        return self.data[self.taken - size : self.taken]


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The wish of a request for an output: bytes behind the JSON, or a part of a region."""

    is_binary: bool
    part: RegionPart | None


class RestService:
    """The endpoints on the models of a folder."""

    def __init__(
        self, models: Models, slot: HostSlot, regions: SharedRegions, admit: Admit, most_bytes: int
    ) -> None:
        self._models, self._slot, self._regions = models, slot, regions
        self._admit, self._most_bytes = admit, most_bytes

    def app(self) -> Starlette:
        """The application."""
        routes = [
            Route(path, self._replying(method, call), methods=[verb]) for verb, path, method, call in _ROUTES
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: _unknown})

    def _replying(self, method: str, call: Endpoint) -> Callable[[Request], Awaitable[Response]]:
        """An endpoint that checks its caller, and replies to errors."""

        async def reply(request: Request) -> Response:
            try:
                if method:
                    self._admit(request.headers.get("authorization"), method)
                with self._slot.calling(), self._slot.holding() as request.state.held:
                    return await call(self, request)
            except ClientDisconnect:
                return Response(status_code=499)
            except Exception as error:
                refusal = refusal_of(error, request.url.path)
            return _refusal_of(refusal)

        return reply

    def _model(self, request: Request) -> LoadedModel:
        return self._models.find(request.path_params["name"], request.path_params.get("version", ""))

    # The server

    async def live(self, request: Request) -> Response:
        return Response(status_code=200)

    async def ready(self, request: Request) -> Response:
        return Response(status_code=200 if self._models.is_ready else 503)

    async def server(self, request: Request) -> Response:
        extensions = descriptions.extensions(has_regions=self._regions.are_allowed)
        return JSONResponse({"name": descriptions.SERVER, "version": __version__, "extensions": extensions})

    # Models

    async def model_ready(self, request: Request) -> Response:
        is_ready = self._models.is_model_ready(
            request.path_params["name"], request.path_params.get("version", "")
        )
        return Response(status_code=200 if is_ready else 503)

    async def metadata(self, request: Request) -> Response:
        model = self._model(request)
        versions = [one.version for one in self._models.loaded(model.name)]
        return JSONResponse(descriptions.metadata(model, versions))

    async def config(self, request: Request) -> Response:
        return JSONResponse(descriptions.config_json(self._model(request)))

    async def statistics(self, request: Request) -> Response:
        name, version = request.path_params.get("name", ""), request.path_params.get("version", "")
        return JSONResponse(descriptions.statistics(self._models.loaded(name, version)))

    # The repository

    async def index(self, request: Request) -> Response:
        body = await self._body(request)
        found = [
            {"name": name, "version": version, "state": entry.state, "reason": entry.reason}
            for name, version, entry in self._models.index()
            if not body.table.get("ready") or entry.state is State.READY
        ]
        return JSONResponse(found)

    async def load(self, request: Request) -> Response:
        body = await self._body(request)
        check_parameters(_table(body.table.get("parameters"), "parameters"))
        await asyncio.shield(self._models.load(request.path_params["name"]))
        return JSONResponse({})

    async def unload(self, request: Request) -> Response:
        body = await self._body(request)
        given = _table(body.table.get("parameters"), "parameters")
        check_parameters(given, frozenset(("unload_dependents",)))
        await asyncio.shield(self._models.unload(request.path_params["name"]))
        return JSONResponse({})

    # Shared memory

    async def regions(self, request: Request) -> Response:
        found = self._regions.status(current_principal().tenant, request.path_params.get("name", ""))
        return JSONResponse(
            [{"name": one.name, "key": one.key, "offset": one.offset, "byte_size": one.size} for one in found]
        )

    async def register(self, request: Request) -> Response:
        table = (await self._body(request)).table
        offset, size = table.get("offset", 0), table.get("byte_size")
        if type(offset) is not int or type(size) is not int:
            raise InvalidInputError("the offset or byte_size of a region is no integer")
        tenant, name = current_principal().tenant, request.path_params["name"]
        self._regions.register(tenant, name, _text(table.get("key")), offset, size)
        return JSONResponse({})

    async def unregister(self, request: Request) -> Response:
        self._regions.unregister(current_principal().tenant, request.path_params.get("name", ""))
        return JSONResponse({})

    # Requests

    async def infer(self, request: Request) -> Response:
        self._models.admit()
        self._model(request)
        body = await self._body(request)
        # It may have been loaded again while the body came.
        model, tenant = self._model(request), current_principal().tenant
        parameters = _table(body.table.get("parameters"), "parameters")
        options = options_of(parameters)
        read = partial(self._regions.read, tenant)
        is_small = body.is_small and not _has_regions(body.table)
        feeds = await _on_thread(is_small, lambda: _feeds_of(model, body, read))
        wanted = _wanted(body.table, parameters, len(model.ports.outputs))
        names = tensors.wanted_outputs(model.ports.outputs, list(wanted))
        otherwise = _Wanted(bool(parameters.get("binary_data_output", False)), None)
        found = await _unless_gone(request, model.infer(tenant, feeds, options))
        table: dict[str, Any] = {"model_name": model.name, "model_version": model.version}
        if isinstance(body.table.get("id"), str):
            table["id"] = body.table["id"]
        outputs = {name: (found[name], wanted.get(name, otherwise)) for name in names}
        is_small &= sum(found[name].nbytes for name in names) < tensors.MOST_ON_LOOP
        write = partial(self._regions.write, tenant)
        return await _on_thread(is_small, lambda: _response(table, outputs, write))

    async def generate(self, request: Request) -> Response:
        """The whole answer to a prompt, as JSON."""
        model, arguments, about = await self._prompt(request)
        found = await _unless_gone(request, model.infer(*arguments))
        return JSONResponse(about | _shown(found))

    async def generate_stream(self, request: Request) -> Response:
        """The answer to a prompt in pieces, each an event."""
        model, arguments, about = await self._prompt(request, is_stream=True)
        answers = model.answers(*arguments)
        # Errors from before the first piece are the reply's.
        first = await _unless_gone(request, anext(answers))
        return StreamingResponse(_events(first, answers, about), media_type="text/event-stream")

    async def _prompt(
        self, request: Request, *, is_stream: bool = False
    ) -> tuple[LoadedModel, tuple[str, Mapping[str, tensors.Array], InferOptions], dict[str, Any]]:
        """Read a request for text: its model, what `LoadedModel.infer` takes, and what its replies
        begin with. Raises UnsupportedError, InvalidInputError."""
        self._models.admit()
        self._model(request)
        table = (await self._body(request)).table
        model = self._model(request)
        if not model.writes:
            raise UnsupportedError(f"the model {model.name!r:.80} writes no text", advice="send it to /infer")
        about = {"model_name": model.name, "model_version": model.version}
        if isinstance(identifier := table.pop("id", None), str):
            about["id"] = identifier
        parameters = {**_table(table.pop("parameters", None), "parameters")}
        feeds, others = prompts.feeds_of_json(table, model.ports.inputs)
        parameters |= others
        if is_stream:
            feeds.pop(prompts.STREAM, None)
            parameters[prompts.STREAM] = True
        return model, (current_principal().tenant, feeds, options_of(parameters)), about

    async def _body(self, request: Request) -> _Body:
        """Read a body. Raises LimitExceededError, InvalidInputError."""
        if request.headers.get("content-encoding", "identity") != "identity":
            raise InvalidInputError("the body is compressed", advice="send it as it is")
        held: HeldBytes = request.state.held
        data = await read_body(request, self._most_bytes, held.add)
        given = request.headers.get(JSON_SIZE)
        if given is None:
            end = len(data)
        elif given.isascii() and given.isdecimal() and len(given) < 20 and int(given) <= len(data):
            end = int(given)
        else:
            raise InvalidInputError(f"{JSON_SIZE} is {given!r:.40}, and the body has {len(data):,} bytes")
        view = memoryview(data)
        is_small = end < tensors.MOST_ON_LOOP
        if not is_small:
            held.add(JSON_GROWTH * end)
        return await _on_thread(is_small, lambda: _Body(_parsed(view[:end]), view[end:], is_small))


async def _on_thread(is_small: bool, function: Callable[[], T]) -> T:
    """Call a function that takes long for large data, which then runs on a thread."""
    return function() if is_small else await asyncio.to_thread(function)


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await work, which is cancelled once the client has left. Raises ClientDisconnect."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(_gone(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _shown(outputs: Mapping[str, tensors.Array]) -> dict[str, Any]:
    """Outputs of one element each as JSON."""
    return {name: tensors.to_elements(array)[0] for name, array in outputs.items()}


async def _events(
    first: Answer, others: AsyncGenerator[Answer], about: Mapping[str, Any]
) -> AsyncGenerator[bytes]:
    """Answers as events of a stream; an error is the last one."""
    async with aclosing(others):
        yield _event({**about, **_shown(first[0])})
        try:
            async for outputs, _ in others:
                yield _event({**about, **_shown(outputs)})
        except HeliographError as error:
            yield _event({"error": text_of(error)})


def _event(table: Mapping[str, Any]) -> bytes:
    return b"data: %s\n\n" % json.dumps(table).encode()


def _parsed(data: memoryview) -> dict[str, Any]:
    try:
        found = paced_json.loads(bytes(data) or b"{}")
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"the body is not JSON: {error}") from None
    return _table(found, "the body")


def _table(value: Any, what: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidInputError(f"{what} is no JSON object")
    return value


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidInputError(f"{what} is no JSON array")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidInputError(f"a name or data type is {short(value)}, and no text")
    return value


def _wanted(table: Mapping[str, Any], parameters: Mapping[str, Any], most: int) -> dict[str, _Wanted]:
    """The outputs that a request names, by name, of a model with so many. Raises
    InvalidInputError."""
    otherwise, found = parameters.get("binary_data_output", False), dict[str, _Wanted]()
    given = _list(table.get("outputs", []), "outputs")
    if len(given) > most:
        raise InvalidInputError(f"{len(given):,} outputs are named, and the model has {most}")
    for one in given:
        own = _table(_table(one, "an output").get("parameters"), "parameters")
        found[_text(one.get("name"))] = _Wanted(bool(own.get("binary_data", otherwise)), region_of(own))
    return found


def _has_regions(table: Mapping[str, Any]) -> bool:
    given = (*_list(table.get("inputs", []), "inputs"), *_list(table.get("outputs", []), "outputs"))
    parameters = (_table(_table(one, "a tensor").get("parameters"), "parameters") for one in given)
    return any("shared_memory_region" in one for one in parameters)


def _feeds_of(model: LoadedModel, body: _Body, read: Read) -> dict[str, tensors.Array]:
    """Return the inputs of a request as arrays. Raises InvalidInputError, and the errors of
    `read`."""
    inputs = [_table(one, "an input") for one in _list(body.table.get("inputs", []), "inputs")]
    tensors.check_inputs(model.ports.inputs, [_text(one.get("name")) for one in inputs])
    ports = {port.name: port for port in model.ports.inputs}
    found = {one["name"]: _feed_of(ports[one["name"]], one, body, read) for one in inputs}
    if body.taken != len(body.data):
        raise InvalidInputError(f"{len(body.data) - body.taken:,} bytes of the body belong to no input")
    return found


def _feed_of(port: tensors.TensorPort, given: Mapping[str, Any], body: _Body, read: Read) -> tensors.Array:
    shape = _list(given.get("shape"), "a shape")
    if not all(type(size) is int for size in shape):
        raise InvalidInputError(f"the shape of input {port.name!r:.80} has sizes that are no integers")
    sizes = tensors.check_port(port, _text(given.get("datatype")), shape)
    parameters = _table(given.get("parameters"), "parameters")
    if (part := region_of(parameters)) is not None:
        return tensors.from_bytes(port, sizes, read(part))
    if "binary_data_size" not in parameters:
        return tensors.from_elements(port, sizes, _list(given.get("data"), f"data of {port.name!r:.80}"))
    size = parameters["binary_data_size"]
    if type(size) is not int or size < 0 or "data" in given:
        raise InvalidInputError(f"input {port.name!r:.80} has a bad binary_data_size, or data too")
    return tensors.from_bytes(port, sizes, body.take(size))


def _response(
    table: dict[str, Any],
    outputs: Mapping[str, tuple[tensors.Array, _Wanted]],
    write: Callable[[RegionPart, memoryview], None],
) -> Response:
    """The reply with these outputs: in regions, behind the JSON, or in it."""
    parts, behind = [json.dumps(table)[:-1], ', "outputs": ['], list[bytes]()
    for name, (array, wanted) in outputs.items():
        one: dict[str, Any] = {"name": name, "datatype": tensors.datatype_of_array(array)}
        one["shape"] = list(array.shape)
        if (part := wanted.part) is not None:
            data = tensors.to_bytes(array)
            write(part, memoryview(data))
            one["parameters"] = {
                "shared_memory_region": part.region,
                "shared_memory_offset": part.offset,
                "shared_memory_byte_size": len(data),
            }
        elif wanted.is_binary:
            behind.append(tensors.to_bytes(array))
            one["parameters"] = {"binary_data_size": len(behind[-1])}
        parts += [", " * (len(parts) > 2), json.dumps(one)[:-1], *_elements(array, wanted), "}"]
    data = "".join((*parts, "]}")).encode()
    if not behind:
        return Response(data, media_type="application/json")
    headers = {JSON_SIZE: str(len(data))}
    return Response(b"".join((data, *behind)), headers=headers, media_type="application/octet-stream")


def _elements(array: tensors.Array, wanted: _Wanted) -> Sequence[str]:
    """The elements of an output as a field of JSON, if they go there."""
    if wanted.is_binary or wanted.part is not None:
        return ()
    try:
        return (', "data": ', *tensors.to_json(array))
    except ValueError:
        raise InvalidInputError(
            "an output has elements that are not finite, which JSON cannot say",
            advice="ask for binary_data of that output",
        ) from None


def _refusal_of(error: HeliographError) -> Response:
    """The reply to an error. Clients repeat a request that got 429, so only where that helps."""
    code, seconds = status_of(error), error.retry_after_seconds
    if code == 429 and seconds is None:
        code = 413
    again = {} if seconds is None else {"retry-after": str(math.ceil(seconds))}
    return _refused(code, text_of(error), again)


def _refused(code: int, text: str, headers: Mapping[str, str] | None = None) -> Response:
    # In ASCII: a text of the request may have half of a surrogate pair.
    return Response(json.dumps({"error": text}), code, headers, "application/json")


async def _unknown(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _refused(error.status_code, error.detail)


_MODEL = "/v2/models/{name}"
_REGION = "/v2/systemsharedmemory/region/{name}"


def _of_model(verb: str, end: str, method: str, call: Endpoint) -> Sequence[tuple[str, str, str, Endpoint]]:
    """The routes of an endpoint of a model, with and without a version."""
    return tuple((verb, f"{_MODEL}{middle}{end}", method, call) for middle in ("", "/versions/{version}"))


#: Verb, path, the name of gRPC's method for the same ("": open to all), and the endpoint.
_ROUTES: tuple[tuple[str, str, str, Endpoint], ...] = (
    ("GET", "/v2", "ServerMetadata", RestService.server),
    ("GET", "/v2/health/live", "", RestService.live),
    ("GET", "/v2/health/ready", "", RestService.ready),
    ("GET", "/v2/models/stats", "ModelStatistics", RestService.statistics),
    *_of_model("GET", "", "ModelMetadata", RestService.metadata),
    *_of_model("GET", "/ready", "ModelReady", RestService.model_ready),
    *_of_model("GET", "/config", "ModelConfig", RestService.config),
    *_of_model("GET", "/stats", "ModelStatistics", RestService.statistics),
    *_of_model("POST", "/infer", "ModelInfer", RestService.infer),
    *_of_model("POST", "/generate", "ModelInfer", RestService.generate),
    *_of_model("POST", "/generate_stream", "ModelStreamInfer", RestService.generate_stream),
    ("POST", "/v2/repository/index", "RepositoryIndex", RestService.index),
    ("POST", "/v2/repository/models/{name}/load", "RepositoryModelLoad", RestService.load),
    ("POST", "/v2/repository/models/{name}/unload", "RepositoryModelUnload", RestService.unload),
    ("GET", "/v2/systemsharedmemory/status", "SystemSharedMemoryStatus", RestService.regions),
    ("POST", "/v2/systemsharedmemory/unregister", "SystemSharedMemoryUnregister", RestService.unregister),
    ("GET", f"{_REGION}/status", "SystemSharedMemoryStatus", RestService.regions),
    ("POST", f"{_REGION}/register", "SystemSharedMemoryRegister", RestService.register),
    ("POST", f"{_REGION}/unregister", "SystemSharedMemoryUnregister", RestService.unregister),
)
