"""The host: its devices, the sessions that share them, and draining. Imports `session`."""
