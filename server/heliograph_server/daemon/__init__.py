"""`heliograph serve`: one process from its start to its end. Imports all other folders."""
