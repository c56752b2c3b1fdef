"""Models that Heliograph knows by itself, written as graphs; they need the extra `models`."""
