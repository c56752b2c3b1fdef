"""Listeners for clients of other systems: each speaks a protocol that exists, on the daemon's own
devices, with its tenants and quotas."""
