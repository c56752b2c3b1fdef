"""What a server that is the head of others needs of the client, and users do not; above the blocking API."""
