"""Soaking: users, operators and faults work on daemons for a long time, and nothing of a daemon grows."""
