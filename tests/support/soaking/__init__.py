"""Soaking: users, operators and faults at work on daemons, and nothing of a daemon grows."""
