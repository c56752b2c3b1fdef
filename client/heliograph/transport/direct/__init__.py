"""TCP connections of a session beside gRPC's: opening them, and the transfers of bytes on them."""
