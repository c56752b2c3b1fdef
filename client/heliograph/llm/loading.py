"""`hg.llm.load`: a model of a file onto a session."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import count
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, TypeAlias, Unpack, get_args, overload

import heliograph as hg
from heliograph.llm.architectures import ENCODERS, architecture_of, bert
from heliograph.llm.configuration import Configuration, Fields
from heliograph.llm.current_session import CurrentSession
from heliograph.llm.decoding_step import Cache
from heliograph.llm.effects import Ask, Procedure, Work, awaited, result_of
from heliograph.llm.encoding import EncoderEngine
from heliograph.llm.files.adapters import AdapterArgument, open_adapters
from heliograph.llm.files.weights import File, LocalWeights, open_file
from heliograph.llm.generating import Engine
from heliograph.llm.graphs import Decoder
from heliograph.llm.language_model import AsyncLanguageModel, LanguageModel
from heliograph.llm.pooling import pooling_of
from heliograph.llm.sampling import is_within
from heliograph.llm.speculating import LOOKUP, Draft, Speculator, check_same_words
from heliograph.llm.tokenizers import Tokenizer, read_tokenizer
from heliograph.lowerings.importers import check_session
from heliograph_proto.devices import Activations, rounds_rows
from heliograph_proto.types import TensorType, dtype

#: A file here, or one on the server: `session.server_weights(name)`.
FileArgument: TypeAlias = str | Path | hg.ServerWeights
#: The types that keys and values are kept in.
CacheType: TypeAlias = Literal["f16", "f32", "bf16", "q8_0", "q4_0"]

#: The context of a model that was made for a longer one, unless another is asked for.
CONTEXT = 4096
_numbers = count()


@dataclass(frozen=True, slots=True)
class Loading:
    """The arguments of `load` that make an engine."""

    context: int | None = None
    cache: str = "f16"
    activations: Activations = "auto"
    adapters: Sequence[AdapterArgument] = ()
    #: Arguments of `session.compile`.
    options: dict[str, Any] = field(default_factory=dict)


@overload
def load(
    session: hg.Session,
    file: FileArgument,
    *,
    context: int | None = None,
    cache: CacheType = "f16",
    activations: Activations = "auto",
    chat_template: str | None = None,
    adapters: Sequence[AdapterArgument] = (),
    draft: FileArgument | Draft | None = None,
    **options: Unpack[hg.CompileOptions],
) -> LanguageModel: ...
@overload
def load(
    session: hg.aio.Session,
    file: FileArgument,
    *,
    context: int | None = None,
    cache: CacheType = "f16",
    activations: Activations = "auto",
    chat_template: str | None = None,
    adapters: Sequence[AdapterArgument] = (),
    draft: FileArgument | Draft | None = None,
    **options: Unpack[hg.CompileOptions],
) -> Awaitable[AsyncLanguageModel]: ...
def load(
    session: hg.Session | hg.aio.Session,
    file: FileArgument,
    *,
    context: int | None = None,
    cache: CacheType = "f16",
    activations: Activations = "auto",
    chat_template: str | None = None,
    adapters: Sequence[AdapterArgument] = (),
    draft: FileArgument | Draft | None = None,
    **options: Any,
) -> LanguageModel | Awaitable[AsyncLanguageModel]:
    """Load a language model from a GGUF file.

    Weights stay in the types that the file has. Those that the server lacks are uploaded, once.

    Args:
        session: A session, or one of `hg.aio`: then the result is awaited.
        file: A path, or a file on the server: `session.server_weights("model.gguf")`.
        context: The most tokens of a prompt and its answer; the default is the model's, at most
            4096. The cache takes memory for all of them.
        cache: The type that keys and values are kept in.
        activations: The precision of rows in products with quantized weights. "q8" rounds them to
            q8_0, as llama.cpp does, and a CPU multiplies integers: two to three times as fast as
            "f32", with other bits. "auto" is "q8" where all devices of the model are CPUs, else
            "f32"; a model keeps what it was loaded with.
        chat_template: A template in place of the file's own, in Jinja's language.
        adapters: Up to 16 LoRA adapters for the model: files, or `hg.llm.Adapter` with a scale.
            Their additions to a product are summed up.
        draft: A smaller model with the same vocabulary, which proposes tokens of answers, or
            "prompt": the text so far does; or `hg.llm.Draft` of one with the number of tokens. The
            model checks several in one run. This changes the time of an answer, and no bit of it.
        options: Arguments of `session.compile`, such as `devices` and `memory`.

    Raises UnsupportedError for an architecture or a type that Heliograph lacks, and for a device
    that lacks what `activations` asks for, which it names, InvalidModelError for a broken file and
    for an adapter that does not fit, InvalidArgumentError for what is no session, and the errors of
    `session.compile`.
    """
    if not isinstance(session, hg.aio.Session):
        check_session(session, "hg.llm.load()")
    found = open_file(file)
    how = Loading(context, cache, activations, adapters, options)
    current = CurrentSession(session)
    engine = engine_of(current, found, how)
    if draft is not None:
        speculator = draft_of(current, engine, found, draft, how)
        assert isinstance(engine, Engine)
        engine.draft = speculator
    loaded = _loaded(current, found, engine, how)
    if isinstance(session, hg.Session):
        return LanguageModel(found.header, engine, result_of(loaded), chat_template)
    return _awaited(found, engine, loaded, chat_template)


async def _awaited(
    found: File,
    engine: Engine | EncoderEngine,
    loaded: Procedure[Any, Tokenizer],
    chat_template: str | None,
) -> AsyncLanguageModel:
    return AsyncLanguageModel(found.header, engine, await awaited(loaded), chat_template)


def _loaded(
    session: CurrentSession, found: File, engine: Engine | EncoderEngine, how: Loading
) -> Procedure[Any, Tokenizer]:
    """Load the engine, and return the tokenizer of its model.

    It is read while the server reads the weights and compiles; of a file here, before anything is
    uploaded. Raises as `check_rounding`, `tokenizer_of` and the engine.
    """
    yield from check_rounding(session, how)
    pool = ThreadPoolExecutor(1, "llm-tokenizer")
    begun = cache(partial(pool.submit, tokenizer_of, found, engine))
    try:
        if isinstance(found.weights, LocalWeights):
            yield Work(lambda: begun().result())
        session.meanwhile(begun)
        yield from engine.prepare()
        try:
            tokenizer: Tokenizer = yield Work(lambda: begun().result())
        except Exception:
            yield from engine.close()
            raise
        return tokenizer
    finally:
        session.not_meanwhile(begun)
        # Of a load that failed, the thread ends by itself.
        pool.shutdown(wait=False)


def tokenizer_of(found: File, engine: Engine | EncoderEngine) -> Tokenizer:
    """Return the tokenizer of a model. Raises InvalidModelError, UnsupportedError and
    ConfigurationError."""
    tokenizer = read_tokenizer(found.header)
    if len(tokenizer) != engine.config.vocabulary:
        raise hg.InvalidModelError(
            f"{found.header.name} has {len(tokenizer)} words and embeddings of {engine.config.vocabulary}",
            advice="convert the model to GGUF again",
        )
    return tokenizer


def engine_of(session: CurrentSession, found: File, how: Loading) -> Engine | EncoderEngine:
    """Return the engine of a model's architecture, which has compiled nothing yet."""
    _check_known("activations", how.activations, get_args(Activations))
    if found.header.value("general.type", str, "model") == "adapter":
        raise hg.InvalidModelError(
            f"{found.header.name} is an adapter, and no model",
            advice="load its model with adapters=[...], or with --lora",
        )
    session.uses(found.weights)
    rounds = rounds_rows(
        how.activations, [one.type for one in session.devices_of(how.options.get("devices"))]
    )
    fields, pooling = Fields(found.header), pooling_of(found.header)
    if fields.architecture in ENCODERS:
        if how.adapters:
            raise hg.UnsupportedError(
                f"{fields.name} is a model of the architecture {fields.architecture!r}: it takes no adapters",
                advice="models that write text take them",
            )
        encoder = replace(bert.configure(fields), rounds_rows=rounds)
        return EncoderEngine(session, encoder, found.weights, pooling, how.options)
    config = architecture_of(fields.architecture, fields.name).configure(fields)
    config = replace(config, rounds_rows=rounds)
    _check_cache(config, how.cache)
    scales = open_adapters(found, how.adapters)
    kept = Cache(f"llm{next(_numbers)}", _context(config, how.context), how.cache)
    for lora in scales.loras:
        session.uses(lora.weights)
    decoder = Decoder(config, found.weights, kept, scales.loras)
    return Engine(session, decoder, pooling, how.options, scales)


def check_rounding(session: CurrentSession, how: Loading) -> Procedure[Any, None]:
    """Raises UnsupportedError where the caller wants rounded rows, and a device has no product of
    them: others would compute all of these."""
    if how.activations != "q8":
        return
    blocks, rows, result = (TensorType(dtype(one), (32, 32)) for one in ("q8_0", "q8_0", "f32"))
    for device in session.devices_of(how.options.get("devices")):
        [answer] = yield Ask(partial(device.query, [hg.OpQuery("mul_mat", (blocks, rows), result)]))
        if answer.why_not:
            raise hg.UnsupportedError(
                f"activations is 'q8', and {device.name} multiplies no rows in q8_0: {answer.why_not}",
                advice='activations="f32" computes with rows in f32, "auto" where a device is no CPU',
            )


def draft_of(
    session: CurrentSession,
    engine: Engine | EncoderEngine,
    found: File,
    draft: FileArgument | Draft,
    how: Loading,
) -> Speculator:
    """Return the proposer of tokens to an engine. Raises as `load`."""
    if isinstance(engine, EncoderEngine):
        engine.refuse()
    given = draft if isinstance(draft, Draft) else Draft(draft)
    if given.file == LOOKUP:
        return Speculator(engine, None, given.tokens)
    other = open_file(given.file)
    if other.header.architecture in ENCODERS:
        raise hg.UnsupportedError(
            f"{other.header.name} writes no text, so it proposes none",
            advice="take a smaller model that writes",
        )
    check_same_words(found.header, other.header)
    most = Fields(other.header).size("context_length")
    proposer = engine_of(session, other, replace(how, context=min(engine.context, most), adapters=()))
    assert isinstance(proposer, Engine)
    return Speculator(engine, proposer, given.tokens)


def _context(config: Configuration, wanted: int | None) -> int:
    """Return the context to use. Raises InvalidArgumentError."""
    if wanted is None:
        return min(config.context, CONTEXT)
    if not is_within(wanted, Integral, 1, config.context):
        raise hg.InvalidArgumentError(
            f"context is {wanted!r:.40}", advice=f"the model takes 1 to {config.context} tokens"
        )
    return int(wanted)


def _check_known(name: str, value: str, known: Sequence[str]) -> None:
    """Raises InvalidArgumentError."""
    if value not in known:
        raise hg.InvalidArgumentError(f"{name} is {value!r:.40}", advice=f"it is one of {', '.join(known)}")


def _check_cache(config: Configuration, cache: str) -> None:
    """Raises InvalidArgumentError for a type that no head's keys and values can be kept in."""
    _check_known("cache", cache, get_args(CacheType))
    sizes, block = (config.key_size, config.value_size), dtype(cache).block_size
    if any(size % block for size in sizes):
        raise hg.InvalidArgumentError(
            f"cache is {cache!r}, of blocks of {block} elements, and a head has {max(sizes)}",
            advice="f16 and f32 fit every model",
        )
