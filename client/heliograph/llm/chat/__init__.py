"""Chat templates of GGUF files: messages to a model's text."""

from heliograph.llm.chat.template import ChatTemplate, checked, read_chat_template

__all__ = ["ChatTemplate", "checked", "read_chat_template"]
