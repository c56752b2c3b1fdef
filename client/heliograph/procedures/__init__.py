"""Operations that take several steps over the wire, for both APIs: upload, compile, run, tap,
rebuild.

May import `core`.
"""
