"""Settings: every one is a field of `ServerConfig`, read from a file, the environment and the command
line.
"""
