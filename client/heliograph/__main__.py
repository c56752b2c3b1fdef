"""`python -m heliograph`: the command line."""

from heliograph.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
