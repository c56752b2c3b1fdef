"""Templates for requests of the open inference protocol that differ in their elements alone.

A client sends a model the same bytes each time, but for the elements of the inputs; so does the
server with its answers. `inline_forms` has such templates for runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from google.protobuf.message import DecodeError

from heliograph_proto.codec.inline_forms import Template, varint
from heliograph_proto.kserve import inference_pb2 as pb

#: The tags of `raw_input_contents` in ModelInferRequest, and of `raw_output_contents` in
#: ModelInferResponse.
_INPUT_TAG, _OUTPUT_TAG = bytes((7 << 3 | 2,)), bytes((6 << 3 | 2,))
#: The most bytes of a request beside the elements, and its most inputs, for it to have a form.
MOST_HEAD_BYTES, MOST_INPUTS = 4096, 256
#: The most sizes of requests with templates, and the most templates of one size.
MOST_SIZES, MOST_OF_SIZE = 64, 4

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RequestForm:
    """Requests with the same bytes but for the elements."""

    #: The bytes before the elements, and the sizes of these.
    head: bytes
    sizes: tuple[int, ...]
    template: Template = field(compare=False)

    @staticmethod
    def of(message: bytes, request: pb.ModelInferRequest) -> RequestForm | None:
        """Return the form of a request.

        Returns None if it has much beside its elements, or many inputs, or has these not at its end
        in `raw_input_contents`, as protobuf writes them.
        """
        if not 0 < len(request.raw_input_contents) <= MOST_INPUTS:
            return None
        raw: list[bytes] = list(request.raw_input_contents)
        marks = [_INPUT_TAG + varint(len(one)) for one in raw]
        head_bytes = len(message) - sum(map(len, raw)) - sum(map(len, marks))
        if head_bytes > MOST_HEAD_BYTES:
            return None
        head = message[:head_bytes]
        sizes = tuple(map(len, raw))
        template = Template((head + marks[0], *marks[1:], b""), sizes)
        # A message is one of its halves merged with the other, so the head alone tells all the rest.
        try:
            is_whole = not pb.ModelInferRequest.FromString(head).raw_input_contents
        except DecodeError:
            return None
        is_form = is_whole and template.match(message, 0) == raw
        return RequestForm(head, sizes, template) if is_form else None


class RequestForms(Generic[T]):
    """The forms of the requests that were answered, a bounded number, and what their bytes mean to
    the server."""

    def __init__(self) -> None:
        self._by_size: dict[int, list[tuple[RequestForm, T]]] = {}

    def find(self, message: bytes) -> tuple[T, list[bytes]] | None:
        """Return the meaning of a request, and the elements of each input; None if its form is not
        known."""
        for form, meaning in self._by_size.get(len(message), ()):
            if (contents := form.template.match(message, 0)) is not None:
                return meaning, contents
        return None

    def add(self, form: RequestForm, meaning: T) -> None:
        """Add a form, or change its meaning."""
        size_bytes = form.template.size_bytes
        if len(self._by_size) >= MOST_SIZES and size_bytes not in self._by_size:
            self._by_size.clear()
        others = [one for one in self._by_size.get(size_bytes, ()) if one[0] != form]
        self._by_size[size_bytes] = [(form, meaning), *others[: MOST_OF_SIZE - 1]]


class AnswerForm:
    """Answers with the same bytes but for the elements."""

    __slots__ = ("_parts",)

    def __init__(self, answer: pb.ModelInferResponse) -> None:
        """`answer`: one of them."""
        head = pb.ModelInferResponse()
        head.CopyFrom(answer)
        del head.raw_output_contents[:]
        marks = [_OUTPUT_TAG + varint(len(one)) for one in answer.raw_output_contents]
        self._parts = [head.SerializeToString(), *marks]

    def message(self, contents: Sequence[bytes]) -> bytes:
        """Return the message with these elements, of the sizes that the first answer had."""
        head, *marks = self._parts
        parts = [head]
        for mark, data in zip(marks, contents, strict=True):
            parts += (mark, data)
        return b"".join(parts)
