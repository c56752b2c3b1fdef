"""Code that commands share: arguments, graph files, tables and progress bars. May import the public
API."""
