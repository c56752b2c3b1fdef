"""Templates for requests of the open inference protocol that differ in their elements alone.

A client sends a model the same bytes each time, but for the elements of the inputs; so does the
server with its answers. `inline_forms` has such templates for runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from google.protobuf.message import DecodeError

from heliograph_proto.codec.inline_forms import Template, varint
from heliograph_proto.kserve import inference_pb2 as pb

#: The tags of `raw_input_contents` in ModelInferRequest, and of `raw_output_contents` in
#: ModelInferResponse.
_INPUT_TAG, _OUTPUT_TAG = bytes((7 << 3 | 2,)), bytes((6 << 3 | 2,))
#: The most bytes of a request beside the elements, for its template to be kept.
MOST_HEAD_BYTES = 4096
#: The most sizes of requests with templates, and the most templates of one size.
MOST_SIZES, MOST_OF_SIZE = 64, 4

T = TypeVar("T")


class RequestForm(Generic[T]):
    """Requests with the same bytes but for the elements, and what these bytes mean to the
    server."""

    __slots__ = ("meaning", "template")

    def __init__(self, template: Template) -> None:
        self.template = template
        #: None until a request of the form was answered.
        self.meaning: T | None = None


class RequestForms(Generic[T]):
    """The forms of the requests so far, a bounded number."""

    def __init__(self) -> None:
        self._by_size: dict[int, list[RequestForm[T]]] = {}

    def find(self, message: bytes) -> tuple[RequestForm[T], list[bytes]] | None:
        """Return the form of a request, and the elements of each input."""
        for form in self._by_size.get(len(message), ()):
            if (contents := form.template.match(message, 0)) is not None:
                return form, contents
        return None

    def add(self, message: bytes, request: pb.ModelInferRequest) -> RequestForm[T] | None:
        """Add the form of a request without one, and return it.

        Returns None if the elements are not at its end in `raw_input_contents`, as protobuf writes
        them.
        """
        raw: list[bytes] = list(request.raw_input_contents)
        marks = [_INPUT_TAG + varint(len(one)) for one in raw]
        head = message[: len(message) - sum(map(len, raw)) - sum(map(len, marks))]
        if not raw or len(head) > MOST_HEAD_BYTES:
            return None
        template = Template((head + marks[0], *marks[1:], b""), [len(one) for one in raw])
        # A message is one of its halves merged with the other, so the head alone tells all the rest.
        try:
            is_whole = not pb.ModelInferRequest.FromString(head).raw_input_contents
        except DecodeError:
            return None
        if not is_whole or template.match(message, 0) != raw:
            return None
        form = RequestForm[T](template)
        if len(self._by_size) >= MOST_SIZES and len(message) not in self._by_size:
            self._by_size.clear()
        others = self._by_size.get(len(message), [])
        self._by_size[len(message)] = [form, *others[: MOST_OF_SIZE - 1]]
        return form


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
