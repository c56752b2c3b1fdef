"""Memory of this host behind the contract: budgeted, and shared with other processes.

May import `contract`.
"""
