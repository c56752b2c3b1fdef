"""Requests of the open inference protocol that differ in their elements alone share a form."""

from __future__ import annotations

import pytest

from heliograph_proto.codec.infer_forms import (
    MOST_HEAD_BYTES,
    MOST_INPUTS,
    AnswerForm,
    RequestForm,
    RequestForms,
)
from heliograph_proto.kserve import inference_pb2 as pb


def request(*contents: bytes, name: str = "model") -> pb.ModelInferRequest:
    made = pb.ModelInferRequest(model_name=name, raw_input_contents=contents)
    for number, data in enumerate(contents):
        made.inputs.add(name=f"x{number}", datatype="UINT8", shape=[len(data)])
    return made


def form_of(made: pb.ModelInferRequest) -> RequestForm | None:
    return RequestForm.of(made.SerializeToString(), made)


def added(forms: RequestForms[str], made: pb.ModelInferRequest, meaning: str = "a meaning") -> str:
    form = form_of(made)
    assert form is not None
    forms.add(form, meaning)
    return meaning


@pytest.mark.parametrize("size", [0, 1, 127, 128, 20_000])
def test_a_request_with_other_elements_has_the_form_of_the_one_before(size: int) -> None:
    forms = RequestForms[str]()
    form = added(forms, request(bytes(size), b"abc"))
    data = bytes(number % 251 for number in range(size))
    assert forms.find(request(data, b"xyz").SerializeToString()) == (form, [data, b"xyz"])


@pytest.mark.parametrize("name", ["model", "a much longer name"])
def test_a_request_that_differs_elsewhere_has_another_form(name: str) -> None:
    forms = RequestForms[str]()
    added(forms, request(b"abc", name=name))
    assert forms.find(request(b"abc", name=f"{name[:-1]}!").SerializeToString()) is None
    assert forms.find(request(b"abcd", name=name).SerializeToString()) is None
    assert forms.find(b"") is None


def test_forms_of_one_size_stand_beside_each_other_and_the_first_goes() -> None:
    forms = RequestForms[str]()
    all_requests = [request(b"abc", name=f"model-{number}") for number in range(9)]
    made = [added(forms, one, one.model_name) for one in all_requests]
    found = [forms.find(one.SerializeToString()) for one in all_requests]
    assert found[:5] == [None] * 5
    assert [one[0] for one in found if one is not None] == made[5:]


def test_requests_of_many_sizes_keep_a_bounded_number_of_forms() -> None:
    forms = RequestForms[str]()
    all_requests = [request(bytes(number)) for number in range(1, 200)]
    for one in all_requests:
        added(forms, one)
    assert 0 < sum(forms.find(one.SerializeToString()) is not None for one in all_requests) <= 64


def test_elements_that_are_not_at_the_end_have_no_form() -> None:
    first, last = request(b"abc"), pb.ModelInferRequest(model_name="model", id="seven")
    message = first.SerializeToString() + last.SerializeToString()
    assert RequestForm.of(message, pb.ModelInferRequest.FromString(message)) is None
    # Between the elements of two inputs.
    parts = [pb.ModelInferRequest(raw_input_contents=[data]).SerializeToString() for data in (b"a", b"b")]
    message = parts[0] + last.SerializeToString() + parts[1]
    assert RequestForm.of(message, pb.ModelInferRequest.FromString(message)) is None


def test_requests_without_elements_or_with_much_beside_them_have_no_form() -> None:
    assert form_of(request()) is None
    assert form_of(request(b"abc", name="m" * MOST_HEAD_BYTES)) is None
    assert form_of(pb.ModelInferRequest(raw_input_contents=[b""] * (MOST_INPUTS + 1))) is None


def test_a_form_has_the_meaning_that_it_was_given_last() -> None:
    forms = RequestForms[str]()
    for meaning in ("first", "second"):
        added(forms, request(b"abc"), meaning)
    assert forms.find(request(b"xyz").SerializeToString()) == ("second", [b"xyz"])


def test_lengths_in_more_bytes_than_they_need_have_no_form() -> None:
    head = pb.ModelInferRequest(model_name="model").SerializeToString()
    message = head + b"\x3a\x83\x00abc"
    read = pb.ModelInferRequest.FromString(message)
    assert list(read.raw_input_contents) == [b"abc"]
    assert RequestForm.of(message, read) is None


@pytest.mark.parametrize("sizes", [(), (3,), (0, 200), (20_000, 1)])
def test_answers_of_a_form_are_those_that_protobuf_writes(sizes: tuple[int, ...]) -> None:
    answer = pb.ModelInferResponse(model_name="model", model_version="7")
    for number, size in enumerate(sizes):
        answer.outputs.add(name=f"y{number}", datatype="UINT8", shape=[size])
        answer.raw_output_contents.append(bytes(size))
    form, contents = AnswerForm(answer), [b"\x07" * size for size in sizes]
    answer.raw_output_contents[:] = contents
    assert pb.ModelInferResponse.FromString(form.message(contents)) == answer
