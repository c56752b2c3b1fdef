"""Sessions that outlive their connection, or leave their daemon: the things kept for a client that
attaches again, and the call that takes a session."""
