"""Constants of a model: tensors in its file, or in files beside it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, SparseTensorProto, TensorProto, numpy_helper

import heliograph as hg
from heliograph.onnx.elements import Array, Item, name_of, numpy_dtype
from heliograph.onnx.errors import broken

#: Element types whose elements share bytes, and how many bits each has.
_PACKED: dict[int, int] = {
    TensorProto.INT4: 4,
    TensorProto.UINT4: 4,
    TensorProto.FLOAT4E2M1: 4,
    TensorProto.INT2: 2,
    TensorProto.UINT2: 2,
}
#: The most bytes of a constant that stays in its message.
_LARGE = 4096
#: The most elements of a constant that is stored as a sparse tensor.
_MOST_SPARSE = 2**26


class Tensors:
    """Reads the constants of one model, each once.

    `folder`: that of the model's file; None if the model is not from a file, and has no others.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = None if folder is None else folder.resolve()
        self._maps: dict[Path, Array] = {}
        self._read: dict[int, tuple[TensorProto, Array]] = {}
        self._kept: dict[str, Array] = {}

    def take(self, model: ModelProto) -> ModelProto:
        """Return a model without the bytes of its large constants, which are kept as arrays.

        Otherwise the message would hold them a second time. Raises InvalidModelError.
        """
        for tensor in model.graph.initializer:
            if tensor.HasField("raw_data") and tensor.ByteSize() > _LARGE:
                self._kept[tensor.name] = self._parse(tensor)
                tensor.ClearField("raw_data")
        # A field that is cleared keeps its memory until the message is gone.
        return ModelProto.FromString(model.SerializeToString()) if self._kept else model

    def read_main(self, tensor: TensorProto) -> Array:
        """As `read`, for a constant of the main graph."""
        kept = self._kept.get(tensor.name)
        return self.read(tensor) if kept is None else kept

    def read(self, tensor: TensorProto) -> Array:
        """Return a tensor's elements, without a copy where it is stored as bytes.

        Raises InvalidModelError.
        """
        if id(tensor) not in self._read:
            self._read[id(tensor)] = (tensor, self._parse(tensor))
        return self._read[id(tensor)][1]

    def read_sparse(self, sparse: SparseTensorProto) -> Array:
        """Return a sparse tensor's elements as a dense array. Raises InvalidModelError."""
        what = f"the sparse constant {sparse.values.name!r:.80}"
        shape = tuple(sparse.dims)
        values, places = self.read(sparse.values), self.read(sparse.indices)
        if any(size < 0 for size in shape) or math.prod(shape) > _MOST_SPARSE:
            raise hg.InvalidModelError(f"{what} has shape {shape}, which is too large")
        made = np.zeros(shape, values.dtype)
        try:
            if places.ndim == 1:
                made.reshape(-1)[places] = values
            else:
                made[tuple(places.T)] = values
        except (IndexError, ValueError) as error:
            raise hg.InvalidModelError(f"{what}: {error}") from None
        return made

    def _parse(self, tensor: TensorProto) -> Array:
        what = f"the constant {tensor.name!r:.80}"
        shape = tuple(tensor.dims)
        if any(size < 0 for size in shape):
            raise hg.InvalidModelError(f"{what} has shape {shape}")
        try:
            if tensor.data_location == TensorProto.EXTERNAL:
                return self._external(tensor, what, shape)
            if tensor.HasField("raw_data"):
                _check_length(tensor, len(tensor.raw_data), what, shape)
            array = numpy_helper.to_array(tensor)
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise hg.InvalidModelError(f"{what} is damaged: {error}") from None
        if array.shape != shape:
            raise hg.InvalidModelError(f"{what} has {array.size} elements, not those of shape {shape}")
        return array

    def _external(self, tensor: TensorProto, what: str, shape: tuple[int, ...]) -> Array:
        """Map a tensor of another file into memory."""
        fields = {one.key: one.value for one in tensor.external_data}
        path = self._path(fields.get("location", ""), what)
        if path not in self._maps:
            try:
                size = path.stat().st_size
                self._maps[path] = np.memmap(path, np.uint8, "r") if size else np.zeros(0, np.uint8)
            except (OSError, ValueError) as error:
                raise hg.InvalidModelError(
                    f"{what} is in {path.name!r:.80}, which cannot be read: {error}",
                    advice="keep the model's files in one folder",
                ) from None
        whole = self._maps[path]
        offset = int(fields.get("offset", "0"))
        length = int(fields.get("length", str(max(0, whole.size - offset))))
        if offset < 0 or length < 0 or offset + length > whole.size:
            raise hg.InvalidModelError(
                f"{what}: {path.name!r:.80} has {whole.size} bytes, and not {length} from {offset} on"
            )
        raw = whole[offset : offset + length]
        expected = _check_length(tensor, length, what, shape, at_least="length" not in fields)
        if tensor.data_type in _PACKED:
            inner = TensorProto(dims=tensor.dims, data_type=tensor.data_type, raw_data=raw.tobytes())
            return numpy_helper.to_array(inner)
        dtype = numpy_dtype(tensor.data_type)
        raw = raw[:expected]
        # Elements that do not begin at a multiple of their size are copied.
        aligned = raw if raw.ctypes.data % dtype.itemsize == 0 else np.array(raw)
        return aligned.view(np.ndarray).view(dtype).reshape(shape)

    def _path(self, location: str, what: str) -> Path:
        """Return the path of a file beside the model. Raises InvalidModelError for others."""
        if self._folder is None:
            raise hg.InvalidModelError(
                f"{what} is in the file {location!r:.80}, and the model is not from a file",
                advice="load the model by its path",
            )
        wanted = self._folder / location
        found = wanted.resolve()
        if not location or Path(location).is_absolute() or not found.is_relative_to(self._folder):
            raise hg.InvalidModelError(
                f"{what} is in {location!r:.80}, outside of the model's folder",
                advice="copy the file into the folder; links out of it are not followed",
            )
        if not found.is_file():
            raise hg.InvalidModelError(
                f"{what} is in {location!r:.80}, which is no file of the model's folder",
                advice="keep the model's files in one folder",
            )
        return found


def _check_length(
    tensor: TensorProto, length: int, what: str, shape: tuple[int, ...], *, at_least: bool = False
) -> int:
    """Return the bytes of a tensor's elements. Raises InvalidModelError if there are not so many."""
    count = math.prod(shape)
    if tensor.data_type in _PACKED:
        expected = -(-count * _PACKED[tensor.data_type] // 8)
    else:
        expected = count * numpy_dtype(tensor.data_type).itemsize
    if length < expected or (length != expected and not at_least):
        kind = name_of(tensor.data_type)
        raise hg.InvalidModelError(
            f"{what} has {length} bytes; shape {shape} of {kind} has {expected}",
            advice="the file is damaged or incomplete; copy it again",
        )
    return expected


#: How each attribute of the op Constant becomes an array.
_SCALARS: dict[str, Any] = {
    "value_float": lambda one: np.array(one.f, np.float32),
    "value_int": lambda one: np.array(one.i, np.int64),
    "value_floats": lambda one: np.array(one.floats, np.float32),
    "value_ints": lambda one: np.array(one.ints, np.int64),
    "value_string": lambda one: np.array(one.s.decode("utf-8", "replace"), object),
    "value_strings": lambda one: np.array([text.decode("utf-8", "replace") for text in one.strings], object),
}


def constant_of(node: NodeProto, tensors: Tensors) -> Item:
    """Return the elements of a node Constant. Raises InvalidModelError."""
    for one in node.attribute:
        if one.name == "value":
            return tensors.read(one.t)
        if one.name == "sparse_value":
            return tensors.read_sparse(one.sparse_tensor)
        if one.name in _SCALARS:
            found: Item = _SCALARS[one.name](one)
            return found
    raise broken(node, "it has no value")
