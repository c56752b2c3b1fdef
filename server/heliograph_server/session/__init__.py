"""One client's session: the pure core in `protocol`, and what drives it against devices.

Imports `compile`, `plans` and `weights`.
"""
