"""The shared device fixtures, and ranks."""

from comm.ranks import ranks
from device_fixtures import dev, rng

__all__ = ["dev", "ranks", "rng"]
