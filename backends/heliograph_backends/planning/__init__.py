"""Pure passes from a validated graph to steps in memory: layout, fusion (within the headroom),
liveness, arena.

They use no device, clock, lock or array: they take graphs and numbers and return frozen values.
"""
