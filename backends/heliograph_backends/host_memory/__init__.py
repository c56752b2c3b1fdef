"""Memory of this host behind the contract: ordinary, with a budget, and shared with other
processes.

Imports only `contract`.
"""
