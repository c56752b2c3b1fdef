"""Requests of one correlation id share state, and those of others have their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kserve_folders import ServedModels, add_graph, add_perceptron, given, given_http, served, states, summing
from tritonclient.utils import InferenceServerException
from waiting import until

from heliograph import admin

ONES = np.ones(2, np.float32)
MOST = 3


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModels]:
    folder = tmp_path_factory.mktemp("models")
    add_graph(folder, "summing", summing(), f"sequences = {MOST}\nsequence_idle_seconds = 3600")
    add_graph(folder, "forgetful", summing(), "sequences = 1\nsequence_idle_seconds = 1")
    with served(folder) as found:
        yield found


def send(models: ServedModels, sequence: Any, name: str = "summing", **options: bool) -> float:
    """Add ones in a sequence, and return the first of the sums."""
    found = models.grpc.infer(name, given(ONES), sequence_id=sequence, **options).as_numpy("y")
    assert found is not None
    return float(found[0])


def test_sequences_keep_state_of_their_own(models: ServedModels) -> None:
    assert send(models, 1, sequence_start=True) == 1.0
    assert send(models, "named", sequence_start=True) == 1.0
    assert [send(models, 1), send(models, 1), send(models, "named")] == [2.0, 3.0, 2.0]
    over_http = models.http.infer("summing", given_http(ONES), sequence_id=1).as_numpy("y")
    assert over_http is not None and over_http[0] == 4.0
    assert send(models, 1, sequence_end=True) == 5.0
    assert send(models, "named", sequence_start=True) == 1.0, "a start begins anew"
    assert send(models, "named", sequence_end=True) == 2.0
    with pytest.raises(InferenceServerException, match="has not begun, or has ended"):
        send(models, 1)


def test_a_stream_keeps_the_order_of_a_sequence(models: ServedModels) -> None:
    answers: list[Any] = []
    models.grpc.start_stream(lambda result, error: answers.append(error or result.as_numpy("y")[0]))
    for number in range(8):
        models.grpc.async_stream_infer(
            "summing", given(ONES), sequence_id=7, sequence_start=number == 0, sequence_end=number == 7
        )
    models.grpc.stop_stream()
    assert sorted(answers) == [float(number) for number in range(1, 9)]


def test_a_model_has_as_many_sequences_as_its_settings_say(models: ServedModels) -> None:
    for sequence in range(1, MOST + 1):
        send(models, sequence, sequence_start=True)
    with pytest.raises(InferenceServerException, match="has 3 of at most 3 sequences in progress"):
        send(models, 99, sequence_start=True)
    for sequence in range(1, MOST + 1):
        assert send(models, sequence, sequence_end=True) == 2.0
    with admin.connect(models.url) as operator:
        until(lambda: len(operator.sessions()) == 2, "the sessions of the sequences are ended")


def test_an_idle_sequence_ends_by_itself(models: ServedModels) -> None:
    send(models, 1, "forgetful", sequence_start=True)

    def has_room() -> bool:
        try:
            return send(models, 2, "forgetful", sequence_start=True) == 1.0
        except InferenceServerException as error:
            assert "has 1 of at most 1 sequences in progress" in str(error)
            return False

    until(has_room, "the first sequence ended")
    with pytest.raises(InferenceServerException, match="has not begun, or has ended"):
        send(models, 1, "forgetful")


def test_models_with_and_without_state_say_what_they_need(models: ServedModels, tmp_path: Path) -> None:
    with pytest.raises(InferenceServerException, match="sequence_id is missing"):
        models.grpc.infer("summing", given(ONES))
    config = models.grpc.get_model_config("summing").config
    assert config.sequence_batching.max_sequence_idle_microseconds == 3600 * 10**6
    add_perceptron(tmp_path, settings="sequences = 2")
    with served(tmp_path) as others:
        assert states(others.grpc) == {("perceptron", "1"): "UNAVAILABLE"}
        (entry,) = others.grpc.get_model_repository_index().models
        assert "no variables" in entry.reason
