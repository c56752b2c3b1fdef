"""Settings: the fields of `ServerConfig`, read from a file, the environment and the command
line."""
