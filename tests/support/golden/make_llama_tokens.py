"""Writes texts and llama.cpp's tokens of them, with the library that `make peers` builds.

PYTHONPATH=tests/support .venv/bin/python tests/support/golden/make_llama_tokens.py
"""

from __future__ import annotations

import ctypes
import json
import sys
import tempfile
import types
from pathlib import Path

from gguf_files import VOCABULARIES, bpe, write_model
from paths import GOLDEN, ROOT

TEXTS = (
    "Hello world", " Hello  world", "Hello\n\nWorld\t!", "4 ½ months, 3 33 333 3333 33333",
    "äöü ß 漢字 カタカナ 한국어", "🚀 (normal) 😶\u200d🌫️ ✅ 👨\u200d👩\u200d👧\u200d👦",
    "I'll don't we've I'LL DON'T it's", "def f(x):\n    return x ** 2  # no\n\n\n\n",
    "'''''' ===== <|x|>", " ", "   ", "\n =", "Cửa Việt", "нещо на Български, Привет мир",
    "a" * 50, "$1,234.56 + 78% = <b>x</b>", "\r\n\r\n  \t tabs\tand\r\n spaces ",
    "ﷺ ﬁ ǅ ⅷ ٣٤٥ १२३", "こんにちは、世界。今日は", "naïve café résumé",
    "for (int i = 0; i < 10; i++) {\n\t//comment\n}", "\u200b\u00a0\u3000 wide",
    "HTMLParser camelCase snake_case SCREAMING_CASE", "</s><s><unk><think>", "tail space ",
    "tail newline\n", "e\u0301 n\u0303 a\u0308", "ＡＢＣ １２３！？",
    "don’t “quotes” — dashes… •", "The daemon serves graphs to many clients.",
)  # fmt: skip
#: Ways to cut text, one of each kind.
WAYS = (
    "default", "gpt-2", "llama-bpe", "dbrx", "qwen2", "qwen35", "smollm", "falcon", "deepseek-coder",
    "deepseek-v3", "tekken", "gpt-4o", "bloom", "viking",
)  # fmt: skip
FILE = GOLDEN / "llama_tokens.json"


def main() -> None:
    """Write llama.cpp's tokens of every text, for each kind of vocabulary."""
    library = _library()
    found: dict[str, list[list[int]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("spm", "wordpiece", *WAYS):
            path = Path(folder, "m.gguf")
            write_model(path, vocabulary=VOCABULARIES[name]() if name in VOCABULARIES else bpe(name))
            options = library.llama_model_default_params()
            options.vocab_only = True
            model = library.llama_model_load_from_file(str(path).encode(), options)
            vocabulary = library.llama_model_get_vocab(model)
            found[name] = [_tokens(library, vocabulary, text) for text in TEXTS]
            library.llama_model_free(model)
    lines = ",\n".join(
        f'"{name}": {json.dumps(values, separators=(",", ":"))}'
        for name, values in {"texts": TEXTS, **found}.items()
    )
    FILE.write_text("{\n" + lines + "\n}\n")


def _tokens(library: types.ModuleType, vocabulary: object, text: str) -> list[int]:
    data = text.encode()
    room = (ctypes.c_int32 * (len(data) + 8))()
    count = library.llama_tokenize(vocabulary, data, len(data), room, len(room), False, False)
    return list(room[:count])


def _library() -> types.ModuleType:
    """The functions of the library alone: the package around it needs other packages."""
    folder = ROOT / ".venv-peers/ggml-rpc"
    sys.path.insert(0, str(folder))
    package = types.ModuleType("llama_cpp")
    package.__path__ = [str(folder / "llama_cpp")]
    sys.modules["llama_cpp"] = package
    from llama_cpp import llama_cpp  # type: ignore[import-not-found]

    library: types.ModuleType = llama_cpp
    library.llama_backend_init()
    return library


if __name__ == "__main__":
    main()
