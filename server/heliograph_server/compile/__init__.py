"""From a client's graph to a plan: placement, memory fit, and plans found again.

Imports `plans`, `weights` and the plan state of `session.protocol`.
"""
