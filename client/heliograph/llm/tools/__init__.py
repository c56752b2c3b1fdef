"""Calls of tools in the text of models, which each family writes in its own way.

    formats.py: the ways, by the marks of a template        readers.py, harmony.py: text to parts
    grammars.py: grammars that force a call                 prompting.py: templates without tools
    pieces.py: tokens to text

Everything here is pure.
"""

from heliograph.llm.tools.calls import Part, Text, Thought, ToolCall
from heliograph.llm.tools.choice import Tool, ToolChoice, tools_of
from heliograph.llm.tools.formats import Format, format_of
from heliograph.llm.tools.grammars import around, forcing
from heliograph.llm.tools.pieces import MessagePieces, Pieces
from heliograph.llm.tools.prompting import for_template
from heliograph.llm.tools.readers import Reader, reader_of

__all__ = [
    "Format",
    "MessagePieces",
    "Part",
    "Pieces",
    "Reader",
    "Text",
    "Thought",
    "Tool",
    "ToolCall",
    "ToolChoice",
    "around",
    "for_template",
    "forcing",
    "format_of",
    "reader_of",
    "tools_of",
]
