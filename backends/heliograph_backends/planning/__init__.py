"""Pure passes from a validated graph to steps in memory: layout, then fusion (within the headroom), then
liveness, then the arena.

No device, clock, lock or array here: graphs and numbers in, frozen values out.
"""
