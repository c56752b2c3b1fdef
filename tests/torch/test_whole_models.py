"""Whole models with random weights, beside eager torch."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed; `make test-torch` installs it")

from torch_vision import mobilenet, resnet50  # noqa: E402

import heliograph as hg  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.slow,
]


def assert_near(found: Any, wanted: Any, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.fixture
def transformers() -> Any:
    return pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.mark.parametrize("make", [resnet50, mobilenet])
def test_a_network_for_images_is_near_eager(make: Any, local: hg.Session) -> None:
    torch.manual_seed(3)
    module, x = make(), torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert_near(hg.torch.export(module, x).compile(local)(x), module(x))


def test_bert_is_near_eager_for_any_batch_and_length(transformers: Any, local: hg.Session) -> None:
    torch.manual_seed(3)
    config = transformers.BertConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    module = transformers.BertModel(config).eval()
    tokens, mask = torch.randint(0, 60, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    model = hg.torch.export(
        module,
        (tokens, mask),
        dynamic={
            "input_ids": {0: "batch", 1: "length"},
            "attention_mask": {0: "batch", 1: "length"},
        },
    )
    plan = model.compile(local)
    for batch, length in ((2, 9), (3, 5)):
        tokens = torch.randint(0, 60, (batch, length))
        mask = torch.ones(batch, length, dtype=torch.long)
        mask[-1, 3:] = 0
        with torch.no_grad():
            wanted = module(tokens, mask)
        found = plan(tokens, mask)
        assert_near(found.last_hidden_state, wanted.last_hidden_state)
        assert_near(found.pooler_output, wanted.pooler_output)


def test_gpt_2_is_near_eager(transformers: Any, local: hg.Session) -> None:
    torch.manual_seed(3)
    config = transformers.GPT2Config(vocab_size=60, n_positions=32, n_embd=32, n_layer=2, n_head=4)
    module = transformers.GPT2LMHeadModel(config).eval()
    tokens = torch.randint(0, 60, (2, 9))
    plan = hg.torch.export(module, tokens, {"use_cache": False}).compile(local)
    with torch.no_grad():
        assert_near(plan(tokens, use_cache=False).logits, module(tokens, use_cache=False).logits)


def test_a_vision_transformer_is_near_eager(transformers: Any, local: hg.Session) -> None:
    torch.manual_seed(3)
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=32,
        patch_size=8,
    )  # fmt: skip
    module, x = transformers.ViTModel(config).eval(), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert_near(
            hg.torch.export(module, x).compile(local)(x).last_hidden_state, module(x).last_hidden_state
        )


def test_a_whisper_encoder_is_near_eager(transformers: Any, local: hg.Session) -> None:
    torch.manual_seed(3)
    config = transformers.WhisperConfig(
        d_model=32, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=64, num_mel_bins=20,
        max_source_positions=25, decoder_layers=1, decoder_attention_heads=4, decoder_ffn_dim=64,
        vocab_size=60, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    module = transformers.WhisperModel(config).encoder.eval()
    x = torch.randn(2, 20, 50)
    with torch.no_grad():
        assert_near(
            hg.torch.export(module, x).compile(local)(x).last_hidden_state, module(x).last_hidden_state
        )
