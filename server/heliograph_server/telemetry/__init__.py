"""What a daemon tells an operator's tools of what it does."""
