"""The shared device fixtures."""

from device_fixtures import dev, rng

__all__ = ["dev", "rng"]
