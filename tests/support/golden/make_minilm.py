"""Makes minilm.npz: embeddings by PyTorch in float64, with the model's own weights and tokeniser.

    python -m venv golden && golden/bin/pip install torch==2.13.0 transformers tokenizers numpy
    golden/bin/python tests/support/golden/make_minilm.py FOLDER_OF_THE_MODEL

Pooling and normalisation are sentence-transformers': the mean over tokens, then unit length.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import BertModel

TEXTS = [
    "A man is eating food.",
    "Someone is having a meal.",
    "",
    "  Ünïcode, punctuation; and UPPER case!  ",
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen",
    "word " * 400,
]


def main() -> None:
    folder = Path(sys.argv[1])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    limits = json.loads((folder / "sentence_bert_config.json").read_text())
    tokenizer.enable_truncation(limits["max_seq_length"])
    model = BertModel.from_pretrained(folder, attn_implementation="eager").double().eval()
    rows = []
    with torch.inference_mode():
        for text in TEXTS:
            ids = torch.tensor([tokenizer.encode(text.strip()).ids])
            hidden = model(ids, attention_mask=torch.ones_like(ids)).last_hidden_state
            rows.append(torch.nn.functional.normalize(hidden.mean(1))[0].numpy())
    np.savez(Path(__file__).with_name("minilm.npz"), texts=np.array(TEXTS), embeddings=np.stack(rows))


if __name__ == "__main__":
    main()
