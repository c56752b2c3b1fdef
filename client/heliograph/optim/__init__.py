"""Optimizers: steps of training that are part of the graph, with their state on the server.

Each function takes variables and their gradients, as `hg.grad` gives them, and adds the nodes that
assign the variables' new values. Moments and counters are variables of the session too, so that a
run of the plan is a step of training, and only its inputs and outputs travel.

Imports `graph`.
"""

from heliograph.optim.steps import adam, adamw, sgd

__all__ = ["adam", "adamw", "sgd"]
