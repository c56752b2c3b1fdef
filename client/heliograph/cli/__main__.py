"""`python -m heliograph.cli`."""

from heliograph.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
