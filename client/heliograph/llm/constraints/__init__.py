"""Answers that follow a grammar: of a JSON schema, a regular expression, Lark's or GBNF's notation.

    Constraint (forms.py) ──▸ Matching (process.py) ──▸ one process for each answer (matching.py)

Grammars come from clients, and some exhaust the library's memory or stack. So each answer's grammar
lives in a process of its own, with bounds.
"""

from heliograph.llm.constraints.forms import Constraint, constraint_of
from heliograph.llm.constraints.process import Matcher, Matching

__all__ = ["Constraint", "Matcher", "Matching", "constraint_of"]
