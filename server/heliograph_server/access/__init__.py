"""Who may connect, as whom, and what they may do: tokens, certificates, and the one check of every call.

    caller ──▸ TLS (certificates) ──▸ gate (tokens, rights) ──▸ services (current_principal)

A daemon that is given neither tokens nor authorities of clients asks nobody: everybody is `ANYBODY`.
"""

from heliograph_server.access.caller import current_principal

__all__ = ["current_principal"]
