"""What the tests of deploy/ use: a container engine of their own, and images that are built in it."""

from deploying.engine import Container, Engine, why_not

__all__ = ["Container", "Engine", "why_not"]
