"""Fixtures and rules for every test."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

# Several engines share the cores: more threads each make steps spike. Read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure() -> None:
    """A run that is asked to end stops the clusters it has started, as after Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    if Path("/proc/driver/nvidia/version").exists():
        return
    skip = pytest.mark.skip(reason="no NVIDIA GPU on this machine")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)
