"""Runs programs: the compiled entries and their cache, the runner, its workers, bound memory."""
