"""The listeners of the open inference protocol ask for tokens, rights and TLS, and obey drains."""

from __future__ import annotations

import signal
import ssl
import threading
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as by_grpc
from access_daemons import Tokens
from certificates import Authority
from kserve_folders import add_graph, add_perceptron, doubling, given, given_http, served
from tritonclient.utils import InferenceServerException
from waiting import until

import heliograph as hg
from heliograph import admin
from heliograph_proto.errors import ConfigurationError
from heliograph_server.config.config import ServerConfig
from heliograph_server.resources.principals import Right

X = np.ones((1, 8), np.float32)


def test_requests_need_a_token_and_loads_the_right_of_operators(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    add_perceptron(folder)
    tokens = Tokens(tmp_path / "tokens.toml", {"alice": (Right.USE,), "olga": (Right.USE, Right.ADMIN)})

    # New ones for each call, since a client changes them.
    def alice() -> dict[str, str]:
        return {"authorization": f"Bearer {tokens.of['alice']}"}

    def olga() -> dict[str, str]:
        return {"authorization": f"Bearer {tokens.of['olga']}"}

    with served(folder, "--tokens", str(tokens.path)) as models:
        assert models.http.is_server_live() and models.http.is_server_ready()
        for client, inputs in ((models.grpc, given(X)), (models.http, given_http(X))):
            with pytest.raises(InferenceServerException, match="requires a token"):
                client.infer("perceptron", inputs)
            with pytest.raises(InferenceServerException, match="token"):
                client.infer("perceptron", inputs, headers={"authorization": "Bearer wrong"})
            assert client.infer("perceptron", inputs, headers=alice()).as_numpy("y").shape == (1, 4)
            with pytest.raises(InferenceServerException, match="may not call RepositoryModelUnload"):
                client.unload_model("perceptron", headers=alice())
            client.unload_model("perceptron", headers=olga())
            client.load_model("perceptron", headers=olga())
        # The sessions of models are the daemon's own: no token ends them.
        tokens.add("late")
        assert models.grpc.infer("perceptron", given(X), headers=alice()).as_numpy("y").shape == (1, 4)


def test_tls_listeners_show_the_daemons_certificate(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    add_perceptron(folder)
    authority = Authority(tmp_path / "authority")
    pair = authority.server()
    tls = ("--tls-certificate", pair.certificate, "--tls-key", pair.key)
    where = {"kserve": "grpcs://127.0.0.1:0", "kserve_http": "https://127.0.0.1:0"}
    with served(folder, *tls, **where, wait=False) as models:
        root = authority.ca
        with by_grpc.InferenceServerClient(models.grpc_url, ssl=True, root_certificates=root) as client:
            until(client.is_server_ready, "the models are loaded")
            assert client.infer("perceptron", given(X)).as_numpy("y").shape == (1, 4)
        context = ssl.create_default_context(cafile=root)
        with urllib.request.urlopen(f"https://{models.http_url}/v2/health/ready", context=context) as reply:
            assert reply.status == 200


EXPOSED: dict[str, tuple[dict[str, Any], str]] = {
    "no folder": ({"kserve": "127.0.0.1:0"}, "there is none"),
    "another host's without access": ({"kserve": "0.0.0.0:0", "models": "m"}, "reached from other hosts"),
    "the same by HTTP": ({"kserve_http": "0.0.0.0:0", "models": "m"}, "reached from other hosts"),
    "tokens in the clear": (
        {"kserve": "0.0.0.0:0", "models": "m", "tokens": "t"}, "would be sent in plain text",
    ),
    "TLS without a certificate": ({"kserve": "grpcs://127.0.0.1:0", "models": "m"}, "needs a certificate"),
    "a unix socket by HTTP": ({"kserve_http": "unix:///s", "models": "m"}, "kserve_http is"),
}  # fmt: skip


@pytest.mark.parametrize("case", EXPOSED)
def test_addresses_are_refused_as_the_daemons_own_are(case: str) -> None:
    settings, words = EXPOSED[case]
    with pytest.raises(ConfigurationError, match=words):
        ServerConfig(**settings)


def test_a_drain_refuses_new_requests_and_answers_those_in_progress(tmp_path: Path) -> None:
    g = hg.Graph()
    x = y = g.input("x", (1024, 1024), "f32")
    for _ in range(40):
        y = y @ x
    g.output("y", y[:1, :1])
    add_graph(tmp_path, "long", g)
    add_graph(tmp_path, "doubling", doubling())
    with served(tmp_path, "--device", "cpu:threads=1") as models:
        answers: list[Any] = []
        zeros = given(np.zeros((1024, 1024), np.float32))
        thread = threading.Thread(target=lambda: answers.append(models.grpc.infer("long", zeros)))
        thread.start()

        def has_begun() -> bool:
            with admin.connect(models.url) as operator:
                return any(one.runs_in_flight for one in operator.snapshot().tenants)

        until(has_begun, "the run has begun")
        models.process.send_signal(signal.SIGTERM)
        until(lambda: not models.grpc.is_server_ready(), "the daemon drains")
        with pytest.raises(InferenceServerException, match="draining"):
            models.grpc.infer("doubling", given(np.ones((2, 3), np.float32)))
        thread.join()
        assert answers[0].as_numpy("y").shape == (1, 1)
