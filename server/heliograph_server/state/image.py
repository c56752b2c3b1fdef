"""The image of a session: everything of it between two commands, as data. Pure.

state.proto documents every field. Bytes of tensors, weights and requests are not in an image but
named by their digests; an image is whole if its store has them all.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from heliograph_proto import codec
from heliograph_proto.digests import DIGEST_BYTES, digest_of
from heliograph_proto.errors import HeliographError, SnapshotFailedError
from heliograph_proto.types import TensorType
from heliograph_proto.v1 import state_pb2

#: The newest version of the format, which images with loops have. An image has the oldest version
#: whose daemons understand it.
FORMAT = 2
_WITHOUT_LOOPS = 1
_MAGIC = b"HGSTATE\0"
_HEADER = struct.Struct("<8sQQ32s")
#: The largest image that is read, far above any within the limits of a session.
MOST_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class ImageOwner:
    """The owner of a session."""

    client: str = ""
    tenant: bytes = b""
    name: str = ""
    rights: tuple[str, ...] = ()
    shown: str = ""
    key: str = ""
    version: int = 1
    features: tuple[str, ...] = ()
    lease_ms: int = 0
    snapshot_ms: int = 0


@dataclass(frozen=True, slots=True)
class ImagePoison:
    """Bytes of a storage that a failed command did not write."""

    start: int
    end: int
    error: HeliographError
    tensor: int
    sequence: int


@dataclass(frozen=True, slots=True)
class ImageStorage:
    """Memory on a device."""

    size_bytes: int
    buffer_bytes: int
    device: str
    buffer_type: str
    usage: int
    #: Of its bytes, in order.
    pieces: tuple[bytes, ...] = ()
    error: HeliographError | None = None
    poisons: tuple[ImagePoison, ...] = ()
    is_mapped: bool = False


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """The place of a tensor. `storage` counts from 1; 0: it was never created."""

    storage: int
    type: TensorType
    offset_bytes: int = 0
    strides_bytes: tuple[int, ...] = ()
    is_placed: bool = False


@dataclass(frozen=True, slots=True)
class ImageTensor:
    """A tensor or a view."""

    handle: int
    layout: ImageLayout
    error: HeliographError | None = None
    failure: HeliographError | None = None


@dataclass(frozen=True, slots=True)
class ImageBuffer:
    """A buffer. Its storages count from 1."""

    handle: int
    storages: tuple[int, ...]
    error: HeliographError | None = None


@dataclass(frozen=True, slots=True)
class ImageStream:
    """A stream."""

    handle: int
    device: str
    failure: HeliographError | None = None
    error: HeliographError | None = None


@dataclass(frozen=True, slots=True)
class ImageEvent:
    """An event, which is reached."""

    handle: int


@dataclass(frozen=True, slots=True)
class ImageVariable:
    """The name of a variable, whose tensor is among the tensors."""

    name: str
    handle: int


@dataclass(frozen=True, slots=True)
class ImageReservation:
    """Memory for plans. `request` is the digest of the encoded request."""

    handle: int
    request: bytes


@dataclass(frozen=True, slots=True)
class ImageBinding:
    """A tensor bound to a leaf of a plan; its handle may have been freed."""

    leaf: int
    layout: ImageLayout
    handle: int


@dataclass(frozen=True, slots=True)
class ImagePlan:
    """A plan. `request` is the digest of the encoded request; empty for one that failed."""

    handle: int
    request: bytes
    bindings: tuple[ImageBinding, ...] = ()
    reservation: int = 0
    error: HeliographError | None = None


@dataclass(frozen=True, slots=True)
class ImageWeight:
    """A weight that the session holds."""

    digest: bytes
    size_bytes: int
    is_in_model: bool = False


@dataclass(frozen=True, slots=True)
class ImageOutput:
    """An output of a loop's last step, by its place."""

    output: int
    #: Of its bytes, in order.
    pieces: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class ImageLoop:
    """A loop between two steps, of a command after the last one of the image."""

    sequence: int
    #: Those that are complete.
    steps: int
    outputs: tuple[ImageOutput, ...] = ()
    #: The values of the last one that its client was not sent.
    unsent: int = 0


@dataclass(frozen=True, slots=True)
class ImageRename:
    """A device that was taken for another one, which left."""

    name: str
    device: str


@dataclass(frozen=True, slots=True)
class Image:
    """A session between two commands, or between two steps of a loop."""

    secret_digest: bytes
    owner: ImageOwner
    last_sequence: int
    variables_made: int = 0
    default_failure: HeliographError | None = None
    storages: tuple[ImageStorage, ...] = ()
    tensors: tuple[ImageTensor, ...] = ()
    buffers: tuple[ImageBuffer, ...] = ()
    streams: tuple[ImageStream, ...] = ()
    events: tuple[ImageEvent, ...] = ()
    variables: tuple[ImageVariable, ...] = ()
    reservations: tuple[ImageReservation, ...] = ()
    plans: tuple[ImagePlan, ...] = ()
    weights: tuple[ImageWeight, ...] = ()
    messages: tuple[bytes, ...] = ()
    acknowledged: int = 0
    time_us: int = 0
    loops: tuple[ImageLoop, ...] = ()
    renamed: tuple[ImageRename, ...] = ()

    def contents(self) -> frozenset[bytes]:
        """The digests of everything that its store must have."""
        return frozenset(self._contents())

    def _contents(self) -> Iterator[bytes]:
        for storage in self.storages:
            yield from storage.pieces
        for loop in self.loops:
            for output in loop.outputs:
                yield from output.pieces
        requests = [one.request for one in self.reservations] + [one.request for one in self.plans]
        yield from filter(None, requests)
        yield from (one.digest for one in self.weights if not one.is_in_model)


def encode_image(image: Image) -> bytes:
    """Return the file of an image."""
    body = codec.encode(image, state_pb2.Image).SerializeToString(deterministic=True)
    version = FORMAT if image.loops else _WITHOUT_LOOPS
    return _HEADER.pack(_MAGIC, version, len(body), digest_of(body)) + body


def decode_image(data: bytes, where: str) -> Image:
    """Return the image in a file, which `where` names in errors. Raises SnapshotFailedError for one
    that is torn, damaged or of a newer version."""
    if len(data) < _HEADER.size or not data.startswith(_MAGIC):
        raise _torn(where, "it does not begin as an image does")
    _, version, size_bytes, digest = _HEADER.unpack_from(data)
    if not _WITHOUT_LOOPS <= version <= FORMAT:
        raise SnapshotFailedError(
            f"image {where} has version {version} of the format, and this daemon knows version {FORMAT}",
            advice="start the newer version of Heliograph that wrote it, or another state folder",
        )
    body = memoryview(data)[_HEADER.size :]
    if len(body) != size_bytes or digest_of(body) != digest:
        raise _torn(where, "its bytes do not match its checksum")
    try:
        return codec.decode(state_pb2.Image.FromString(bytes(body)), Image)
    except (DecodeError, HeliographError, ValueError) as error:
        raise _torn(where, f"it cannot be read: {error}") from None


def check_digest(digest: bytes, where: str) -> bytes:
    """Return a digest of an image. Raises SnapshotFailedError for bytes that are none."""
    if len(digest) != DIGEST_BYTES:
        raise _torn(where, "a digest in it is no digest")
    return digest


def _torn(where: str, why: str) -> SnapshotFailedError:
    return SnapshotFailedError(
        f"image {where} is torn or damaged: {why}", advice="the image before it is used, if there is one"
    )
