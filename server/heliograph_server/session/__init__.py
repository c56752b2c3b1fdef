"""One client's session: the pure core in `protocol`, and its runtime, which drives devices.

Imports `compile`, `plans` and `weights`.
"""
