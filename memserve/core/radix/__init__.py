"""The local index: see `index.py`."""

from __future__ import annotations

from memserve.core.radix.index import RadixIndex
from memserve.core.radix.nodes import ABSENT
from memserve.core.radix.results import Cursor, Insertion, Locations, Match

__all__ = ["ABSENT", "Cursor", "Insertion", "Locations", "Match", "RadixIndex"]
