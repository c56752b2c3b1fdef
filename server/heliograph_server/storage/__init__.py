"""Contents in files: the cache that daemons of one user share, and the models of an operator's folder."""
