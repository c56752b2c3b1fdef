"""Authentication: tokens, certificates, and one interceptor that checks every call before it is
read.

    client ──▸ TLS (certificates) ──▸ interceptor (tokens, rights) ──▸ services (current_principal)

Without tokens and without client authorities, every caller is `ANYBODY`. Imports `runtime` and
`config`.
"""
