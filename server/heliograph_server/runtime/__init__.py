"""The host: its devices, the sessions that share them, and how it drains. Imports `session`."""
