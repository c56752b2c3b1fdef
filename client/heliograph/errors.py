"""Every error that Heliograph raises; `heliograph_proto.errors` shows the tree.

Each error has `message`, `advice`, `reason` (a number of the contract) and `origin` (op, node name,
operand types, and the line of user code that built the node).
"""

# ruff: noqa: F403 - the names are listed there
from heliograph_proto.errors import *
from heliograph_proto.errors import __all__ as __all__
