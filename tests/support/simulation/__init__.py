"""Simulations of the pure parts: virtual time, random schedules and losses, invariants at each step.

Everything random comes from one seed, so a seed replays its schedule exactly.
"""
