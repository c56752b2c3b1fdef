"""`hg.llm`: language models from GGUF files.

    with hg.connect("grpc://127.0.0.1:7070") as session:
        llm = hg.llm.load(session, "model.gguf")
        for piece in llm.generate("Once upon a time", max_tokens=100):
            print(piece, end="")
        print(llm.chat([{"role": "user", "content": "Hello!"}]).text)

`read_header`, `read_tokenizer` and `read_chat_template` give the parts of a file by themselves. The
first use of a tokenizer or a chat template imports its package: `pip install 'heliograph[llm]'`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from heliograph.lowerings.importers import lazy_names

if TYPE_CHECKING:
    from heliograph.llm.architectures import ARCHITECTURES
    from heliograph.llm.chat import ChatTemplate, read_chat_template
    from heliograph.llm.files.adapters import Adapter
    from heliograph.llm.files.headers import read_header
    from heliograph.llm.generating import Logprob, Result, Speculation
    from heliograph.llm.language_model import Answer, AsyncAnswer, AsyncLanguageModel, LanguageModel, Options
    from heliograph.llm.loading import load
    from heliograph.llm.speculating import Draft
    from heliograph.llm.tokenizers import DecodeStream, Tokenizer, read_tokenizer
    from heliograph.llm.tools import ToolCall

__all__ = [
    "ARCHITECTURES",
    "Adapter",
    "Answer",
    "AsyncAnswer",
    "AsyncLanguageModel",
    "ChatTemplate",
    "DecodeStream",
    "Draft",
    "LanguageModel",
    "Logprob",
    "Options",
    "Result",
    "Speculation",
    "Tokenizer",
    "ToolCall",
    "load",
    "read_chat_template",
    "read_header",
    "read_tokenizer",
]

_MODULES = {
    "ARCHITECTURES": "architectures",
    "Adapter": "files.adapters",
    "Answer": "language_model",
    "AsyncAnswer": "language_model",
    "AsyncLanguageModel": "language_model",
    "ChatTemplate": "chat",
    "DecodeStream": "tokenizers",
    "Draft": "speculating",
    "LanguageModel": "language_model",
    "Logprob": "generating",
    "Options": "language_model",
    "Result": "generating",
    "Speculation": "generating",
    "Tokenizer": "tokenizers",
    "ToolCall": "tools",
    "load": "loading",
    "read_chat_template": "chat",
    "read_header": "files.headers",
    "read_tokenizer": "tokenizers",
}

__getattr__ = lazy_names("heliograph.llm", _MODULES)


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
