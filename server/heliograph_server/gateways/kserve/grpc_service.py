"""GRPCInferenceService: the protocol over gRPC."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeAlias, TypeVar

import grpc
from grpc import aio

from heliograph_proto import __version__
from heliograph_proto.codec.infer_forms import AnswerForm, RequestForm, RequestForms
from heliograph_proto.codec.status import code_for
from heliograph_proto.errors import HeliographError, InvalidInputError, LimitExceededError
from heliograph_proto.kserve import inference_pb2 as pb
from heliograph_server.gateways.kserve import descriptions, tensors
from heliograph_server.gateways.kserve.loaded import LoadedModel
from heliograph_server.gateways.kserve.registry import Models, State, check_parameters
from heliograph_server.gateways.kserve.requests import (
    NO_WISHES,
    InferOptions,
    RegionPart,
    options_of,
    region_of,
    text_of,
)
from heliograph_server.gateways.kserve.shared_regions import SharedRegions
from heliograph_server.resources.principals import current_principal
from heliograph_server.rpc.decoding import decode_tensors
from heliograph_server.rpc.errors import refusal_of
from heliograph_server.rpc.receiving import first_of
from heliograph_server.runtime.host_slot import HostSlot

SERVICE = "inference.GRPCInferenceService"
#: The most requests of one stream that are not answered yet; further ones are not read until then.
MOST_OF_STREAM = 256
#: The most bytes of the outputs in an answer.
MOST_ANSWER_BYTES = 2**31 - 2**20
_CODES = {code.value[0]: code for code in grpc.StatusCode}
_KINDS = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name

Context = aio.ServicerContext[Any, Any]
#: Reads a message, and answers a request.
Read = Callable[[bytes], Awaitable[Any]]
Answer = Callable[[Any, Context], Awaitable[Any]]
#: The answers of a stream, each with whether it is the last one of its request, and what is set
#: once its client has taken it; None: no more come.
_Answers: TypeAlias = "asyncio.Queue[tuple[pb.ModelStreamInferResponse, bool, asyncio.Event] | None]"
T = TypeVar("T")


class InferenceService:
    """The methods of the service on the models of a folder."""

    def __init__(self, models: Models, slot: HostSlot, regions: SharedRegions) -> None:
        self._models, self._slot, self._regions = models, slot, regions
        self._forms = RequestForms[_Meaning]()

    def add_to(self, server: aio.Server) -> None:
        """Add the service to a server."""
        names = [name for name in _KINDS if name != "ModelStreamInfer"]
        handlers: dict[str, Any] = {name: self._handler(name, *self._method(name)) for name in names}
        handlers["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
            self._stream, None, pb.ModelStreamInferResponse.SerializeToString
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    def _method(self, name: str) -> tuple[Read, Answer, Callable[[Any], bytes] | None]:
        """Return the functions that read a method's request, answer it, and write the answer."""
        if name == "ModelInfer":
            return self._read_infer, self._infer, None
        answer: Answer = getattr(self, name)
        request, response = getattr(pb, f"{name}Request"), getattr(pb, f"{name}Response")
        return partial(decode_tensors, request), answer, response.SerializeToString

    def _handler(
        self,
        name: str,
        read: Read,
        answer: Answer,
        to_bytes: Callable[[Any], bytes] | None,
    ) -> Any:
        """A handler that takes its one message in bounded time, and refuses bytes that are none."""

        async def receive(_: object, context: Context) -> Any:
            try:
                message: Any = await first_of(context.read())
                if message is aio.EOF:
                    message = b""
                with self._slot.calling(), self._slot.holding(len(message)):
                    request = await read(message)
                    del message
                    return await answer(request, context)
            except Exception as error:
                refusal = refusal_of(error, name)
            await _abort(context, refusal)

        return grpc.stream_unary_rpc_method_handler(receive, None, to_bytes)

    # The server

    async def ServerLive(self, request: pb.ServerLiveRequest, context: Context) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: pb.ServerReadyRequest, context: Context) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._models.is_ready)

    async def ServerMetadata(
        self, request: pb.ServerMetadataRequest, context: Context
    ) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(
            name=descriptions.SERVER,
            version=__version__,
            extensions=descriptions.extensions(has_regions=self._regions.are_allowed),
        )

    # Models

    async def ModelReady(self, request: pb.ModelReadyRequest, context: Context) -> pb.ModelReadyResponse:
        return pb.ModelReadyResponse(ready=self._models.is_model_ready(request.name, request.version))

    async def ModelMetadata(
        self, request: pb.ModelMetadataRequest, context: Context
    ) -> pb.ModelMetadataResponse:
        model = self._models.find(request.name, request.version)
        versions = [one.version for one in self._models.loaded(request.name)]
        return descriptions.message_of(pb.ModelMetadataResponse(), descriptions.metadata(model, versions))

    async def ModelConfig(self, request: pb.ModelConfigRequest, context: Context) -> pb.ModelConfigResponse:
        model = self._models.find(request.name, request.version)
        return descriptions.message_of(pb.ModelConfigResponse(), {"config": descriptions.config(model)})

    async def ModelStatistics(
        self, request: pb.ModelStatisticsRequest, context: Context
    ) -> pb.ModelStatisticsResponse:
        found = self._models.loaded(request.name, request.version)
        return descriptions.message_of(pb.ModelStatisticsResponse(), descriptions.statistics(found))

    # The repository

    async def RepositoryIndex(
        self, request: pb.RepositoryIndexRequest, context: Context
    ) -> pb.RepositoryIndexResponse:
        found = pb.RepositoryIndexResponse()
        for name, version, entry in self._models.index():
            if not request.ready or entry.state is State.READY:
                found.models.add(name=name, version=version, state=entry.state, reason=entry.reason)
        return found

    async def RepositoryModelLoad(
        self, request: pb.RepositoryModelLoadRequest, context: Context
    ) -> pb.RepositoryModelLoadResponse:
        check_parameters(request.parameters)
        await asyncio.shield(self._models.load(request.model_name))
        return pb.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(
        self, request: pb.RepositoryModelUnloadRequest, context: Context
    ) -> pb.RepositoryModelUnloadResponse:
        check_parameters(request.parameters, frozenset(("unload_dependents",)))
        await asyncio.shield(self._models.unload(request.model_name))
        return pb.RepositoryModelUnloadResponse()

    # Shared memory

    async def SystemSharedMemoryStatus(
        self, request: pb.SystemSharedMemoryStatusRequest, context: Context
    ) -> pb.SystemSharedMemoryStatusResponse:
        found = pb.SystemSharedMemoryStatusResponse()
        for one in self._regions.status(current_principal().tenant, request.name):
            region = found.regions[one.name]
            region.name, region.key, region.offset, region.byte_size = one.name, one.key, one.offset, one.size
        return found

    async def SystemSharedMemoryRegister(
        self, request: pb.SystemSharedMemoryRegisterRequest, context: Context
    ) -> pb.SystemSharedMemoryRegisterResponse:
        tenant = current_principal().tenant
        self._regions.register(tenant, request.name, request.key, request.offset, request.byte_size)
        return pb.SystemSharedMemoryRegisterResponse()

    async def SystemSharedMemoryUnregister(
        self, request: pb.SystemSharedMemoryUnregisterRequest, context: Context
    ) -> pb.SystemSharedMemoryUnregisterResponse:
        self._regions.unregister(current_principal().tenant, request.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    # Requests

    async def _read_infer(self, message: bytes) -> _Asked:
        """Read a request: its elements alone, if one like it was answered. Raises as
        `decode_tensors` and `Models.find`."""
        if (found := self._forms.find(message)) is not None:
            meaning, contents = found
            model = self._models.find(meaning.name, meaning.version)
            if model is meaning.model():
                return _Known(model, meaning, contents)
        request = await decode_tensors(pb.ModelInferRequest, message)
        tensors_of: tuple[Any, ...] = (*request.inputs, *request.outputs)
        # Ids differ from one request to the next.
        is_plain = not request.id and not request.parameters and not any(one.parameters for one in tensors_of)
        return request, RequestForm.of(message, request) if is_plain else None

    async def _infer(self, asked: _Asked, context: Context) -> bytes:
        left = context.time_remaining()
        seconds = left if left is not None else float("inf")
        if isinstance(asked, _Known):
            self._models.admit()
            feeds = asked.meaning.feeds(asked.contents)
            tenant = current_principal().tenant
            found = await asked.model.infer(tenant, feeds, NO_WISHES, seconds)
            return asked.meaning.answer(asked.model, found)
        request, form = asked
        given = await self._given(request, seconds)
        outputs = await given.model.infer(*given.arguments)
        response = await given.response(outputs)
        if form is not None and (meaning := _Meaning.of(request, given, outputs, response)) is not None:
            self._forms.add(form, meaning)
        return response.SerializeToString()

    async def _given(
        self,
        request: pb.ModelInferRequest,
        seconds: float,
        turn: AbstractAsyncContextManager[object] | None = None,
    ) -> _Given:
        """Read a request. `turn` is held meanwhile."""
        self._models.admit()
        model = self._models.find(request.model_name, request.model_version)
        options = options_of(parameters_of(request.parameters))
        tenant = current_principal().tenant
        # Only parameters name regions.
        tensors_of: tuple[Any, ...] = (*request.inputs, *request.outputs)
        has_parameters = any(one.parameters for one in tensors_of)
        is_large = not request.raw_input_contents and request.ByteSize() > tensors.MOST_ON_LOOP
        read = partial(feeds_of, model, request, partial(self._regions.read, tenant))
        if turn is None and not (has_parameters or is_large):
            feeds = read()
        else:
            async with turn or nullcontext():
                feeds = await _perhaps_on_thread(has_parameters or is_large, read)
        # There is no further wait before the request is queued, so those of a stream keep their order.
        names = [one.name for one in request.outputs]
        wanted: dict[str, RegionPart | None] = dict.fromkeys(
            tensors.wanted_outputs(model.ports.outputs, names)
        )
        if has_parameters:
            wanted |= {one.name: region_of(parameters_of(one.parameters)) for one in request.outputs}
        write = partial(self._regions.write, tenant)
        return _Given(model, request.id, (tenant, feeds, options, seconds), wanted, write, has_parameters)

    async def _stream(
        self, requests: AsyncIterator[bytes], context: Context
    ) -> AsyncIterator[pb.ModelStreamInferResponse]:
        """Answer the requests of a stream, each as soon as it is ready."""
        try:
            with self._slot.calling():
                async for answer in self._answers(requests):
                    yield answer
                return
        except Exception as error:
            refusal = refusal_of(error, "ModelStreamInfer")
        await _abort(context, refusal)

    async def _answers(self, requests: AsyncIterator[bytes]) -> AsyncIterator[pb.ModelStreamInferResponse]:
        answers: _Answers = asyncio.Queue()
        room = asyncio.Semaphore(MOST_OF_STREAM)
        reading = asyncio.create_task(self._read(requests, answers, room))
        try:
            while (found := await answers.get()) is not None:
                answer, is_last, taken = found
                yield answer
                taken.set()
                if is_last:
                    room.release()
            await reading
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _read(
        self,
        requests: AsyncIterator[bytes],
        answers: _Answers,
        room: asyncio.Semaphore,
    ) -> None:
        """Begin the requests of a stream, and mark its end once all are answered.

        Raises as `decode_tensors`.
        """
        begun: set[asyncio.Task[None]] = set()
        turn = asyncio.Lock()
        try:
            while True:
                await room.acquire()
                message = await anext(requests, None)
                if message is None:
                    break
                request = await decode_tensors(pb.ModelInferRequest, message)
                task = asyncio.create_task(self._answer(request, len(message), answers, turn))
                # The task has it alone.
                del message, request
                begun.add(task)
                task.add_done_callback(begun.discard)
            await asyncio.gather(*begun)
        finally:
            for task in begun:
                task.cancel()
            answers.put_nowait(None)

    async def _answer(
        self, request: pb.ModelInferRequest, size_bytes: int, answers: _Answers, turn: asyncio.Lock
    ) -> None:
        is_last, taken = False, asyncio.Event()
        try:
            with self._slot.holding(size_bytes) as held:
                given = await self._given(request, float("inf"), turn)
                async with aclosing(given.model.answers(*given.arguments)) as found:
                    async for outputs, is_last in found:
                        response = await given.response(outputs)
                        held.add(response.ByteSize())
                        taken = asyncio.Event()
                        answers.put_nowait((_of_stream(response, is_last=is_last), is_last, taken))
                # A client that takes none holds what waits for it.
                await taken.wait()
        except Exception as error:
            made = _of_stream(pb.ModelInferResponse(id=request.id), is_last=True)
            made.error_message = text_of(refusal_of(error, "ModelStreamInfer"))
            answers.put_nowait((made, True, taken))


@dataclass(frozen=True, slots=True)
class _Given:
    """A request that was read."""

    model: LoadedModel
    request_id: str
    #: Of `LoadedModel.infer`.
    arguments: tuple[str, Mapping[str, tensors.Array], InferOptions, float]
    #: The outputs that are wanted, and the parts of regions that they go to.
    wanted: Mapping[str, RegionPart | None]
    write: Callable[[RegionPart, memoryview], None]
    has_regions: bool

    async def response(self, outputs: Mapping[str, tensors.Array]) -> pb.ModelInferResponse:
        """Return the answer with these outputs. Raises as `response_of`."""
        chosen = {name: (outputs[name], part) for name, part in self.wanted.items()}
        return await _perhaps_on_thread(
            self.has_regions, partial(response_of, self.model, self.request_id, chosen, self.write)
        )


@dataclass(frozen=True, slots=True)
class _Meaning:
    """The request that a form stands for. None of them has parameters."""

    #: The model that answered, while it is loaded.
    model: weakref.ref[LoadedModel]
    #: The model as the requests name it.
    name: str
    version: str
    inputs: tuple[tuple[tensors.TensorPort, tuple[int, ...]], ...]
    outputs: tuple[str, ...]
    #: The answers' data types and shapes, and their form.
    kinds: list[tuple[Any, tuple[int, ...]]]
    form: AnswerForm

    @staticmethod
    def of(
        request: pb.ModelInferRequest,
        given: _Given,
        outputs: Mapping[str, tensors.Array],
        response: pb.ModelInferResponse,
    ) -> _Meaning | None:
        """The meaning of a request's form, once it was answered; None if texts are among the
        outputs, which differ in size."""
        kinds = _kinds_of([outputs[name] for name in given.wanted])
        if any(kind.hasobject for kind, _ in kinds):
            return None
        ports = {port.name: port for port in given.model.ports.inputs}
        inputs = tuple((ports[one.name], tuple(one.shape)) for one in request.inputs)
        model, names = weakref.ref(given.model), (request.model_name, request.model_version)
        return _Meaning(model, *names, inputs, tuple(given.wanted), kinds, AnswerForm(response))

    def feeds(self, contents: Sequence[bytes]) -> dict[str, tensors.Array]:
        """Return the inputs with these elements. Raises InvalidInputError."""
        return {
            port.name: tensors.from_bytes(port, shape, data)
            for (port, shape), data in zip(self.inputs, contents, strict=True)
        }

    def answer(self, model: LoadedModel, outputs: Mapping[str, tensors.Array]) -> bytes:
        """Return the answer with these outputs. Raises as `response_of`."""
        arrays = [outputs[name] for name in self.outputs]
        if _kinds_of(arrays) == self.kinds:
            return self.form.message([tensors.to_bytes(one) for one in arrays])
        chosen = {name: (array, None) for name, array in zip(self.outputs, arrays, strict=True)}
        message: bytes = response_of(model, "", chosen, lambda *_: None).SerializeToString()
        return message


def _kinds_of(arrays: Sequence[tensors.Array]) -> list[tuple[Any, tuple[int, ...]]]:
    return [(one.dtype, one.shape) for one in arrays]


class _Known(NamedTuple):
    """A request of a form that was answered before."""

    model: LoadedModel
    meaning: _Meaning
    #: The elements of each input.
    contents: Sequence[bytes]


#: A request, and its form if others may have it too.
_Asked: TypeAlias = "_Known | tuple[pb.ModelInferRequest, RequestForm | None]"


def _of_stream(response: pb.ModelInferResponse, *, is_last: bool) -> pb.ModelStreamInferResponse:
    """Return an answer of a stream, with the mark of the last one of its request."""
    response.parameters["triton_final_response"].bool_param = is_last
    return pb.ModelStreamInferResponse(infer_response=response)


async def _perhaps_on_thread(is_on_thread: bool, function: Callable[[], T]) -> T:
    """Call a function, on a thread if it may take long."""
    return await asyncio.to_thread(function) if is_on_thread else function()


async def _abort(context: Context, error: HeliographError) -> NoReturn:
    await context.abort(_CODES[code_for(error)], text_of(error))


def parameters_of(parameters: Mapping[str, pb.InferParameter]) -> dict[str, Any]:
    """Return the values of parameters by name."""
    if not parameters:
        return {}
    return {
        name: getattr(one, kind) if (kind := one.WhichOneof("parameter_choice")) else None
        for name, one in parameters.items()
    }


def feeds_of(
    model: LoadedModel, request: pb.ModelInferRequest, read: Callable[[RegionPart], bytearray]
) -> dict[str, tensors.Array]:
    """Return the inputs of a request as arrays. `read` reads those in regions. Raises
    InvalidInputError, and the errors of `read`."""
    inputs = tuple(request.inputs)
    tensors.check_inputs(model.ports.inputs, [one.name for one in inputs])
    ports = {port.name: port for port in model.ports.inputs}
    parts = [region_of(parameters_of(given)) if (given := one.parameters) else None for one in inputs]
    raw = request.raw_input_contents
    if raw and len(raw) != parts.count(None):
        raise InvalidInputError(
            f"{parts.count(None)} inputs are in no region, and there are {len(raw)} of raw_input_contents",
            advice="give the bytes of all such inputs there, or each one's contents",
        )
    found, place = dict[str, tensors.Array](), 0
    for one, part in zip(inputs, parts, strict=True):
        port = ports[one.name]
        shape = tensors.check_port(port, one.datatype, one.shape)
        if part is not None:
            found[one.name] = tensors.from_bytes(port, shape, read(part))
        elif not raw:
            found[one.name] = tensors.from_contents(port, shape, _elements(port, one))
        elif one.HasField("contents"):
            raise InvalidInputError(f"input {one.name!r:.80} has contents, and raw_input_contents too")
        else:
            found[one.name] = tensors.from_bytes(port, shape, raw[place])
            place += 1
    return found


def _elements(port: tensors.TensorPort, given: pb.ModelInferRequest.InferInputTensor) -> Any:
    """The typed elements of an input. Raises InvalidInputError."""
    if (field := tensors.CONTENTS.get(port.datatype)) is None:
        raise InvalidInputError(
            f"input {port}, which has no typed contents", advice="send it in raw_input_contents"
        )
    for other, _ in given.contents.ListFields():
        if other.name != field:
            raise InvalidInputError(f"input {port}, and its elements are in {other.name}", advice=field)
    return getattr(given.contents, field)


def response_of(
    model: LoadedModel,
    request_id: str,
    outputs: Mapping[str, tuple[tensors.Array, RegionPart | None]],
    write: Callable[[RegionPart, memoryview], None],
) -> pb.ModelInferResponse:
    """Return the answer with these outputs; `write` writes those in regions.

    Raises LimitExceededError beyond what a message can hold, and the errors of `write`.
    """
    found = pb.ModelInferResponse(model_name=model.name, model_version=model.version, id=request_id)
    for name, (array, part) in outputs.items():
        _add_output(found, name, array, part, write)
    return found


def _add_output(
    answer: pb.ModelInferResponse,
    name: str,
    array: tensors.Array,
    part: RegionPart | None,
    write: Callable[[RegionPart, memoryview], None],
) -> None:
    added = answer.outputs.add(name=name, datatype=tensors.datatype_of_array(array), shape=array.shape)
    data = tensors.to_bytes(array)
    if part is None:
        if len(data) + sum(map(len, answer.raw_output_contents)) > MOST_ANSWER_BYTES:
            raise LimitExceededError(
                f"the outputs have more than {MOST_ANSWER_BYTES:,} bytes", advice="ask for fewer outputs"
            )
        answer.raw_output_contents.append(data)
        return
    write(part, memoryview(data))
    # Each output has a place here.
    answer.raw_output_contents.append(b"")
    added.parameters["shared_memory_region"].string_param = part.region
    added.parameters["shared_memory_byte_size"].int64_param = len(data)
    if part.offset:
        added.parameters["shared_memory_offset"].int64_param = part.offset
