"""Client functions for a server that is the head of other servers; above the blocking API."""
