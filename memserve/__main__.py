"""`python -m memserve` is `memserve`."""

from __future__ import annotations

from memserve.cli import main

if __name__ == "__main__":
    main()
