"""Doing again the commands that a restarted daemon lacks."""
