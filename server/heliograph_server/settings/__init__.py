"""The settings of a dataclass whose fields carry `Setting`s: keys of a TOML file, variables and flags.

    table.py     what there is: every setting with its key, variable and flag
    values.py    whether a value is one, and what a text means
    sources.py   what files, the environment and command lines say
    example.py   a file with every setting and its default

Which configuration it is, they do not know; `heliograph_server.config` does.
"""
