"""Operations of several steps over the wire: upload, compile, run, tap, rebuild; for both APIs.

May import `core`.
"""
