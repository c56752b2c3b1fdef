"""Pure passes from a validated graph to steps in memory: layout, then fusion, then the arena.

No device, clock, lock or array here: graphs and numbers in, frozen dataclasses out.
"""
