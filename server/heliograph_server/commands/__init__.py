"""Commands of `heliograph` that need the server or the backends, in the entry points
`heliograph.commands`.

May import all of the server and `heliograph.cli.common`.
"""
