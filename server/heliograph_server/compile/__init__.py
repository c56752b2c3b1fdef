"""Compiles a client's graph into a plan: placement, memory fit, and a cache of plans.

Imports `plans`, `weights` and the plan state of `session.protocol`.
"""
