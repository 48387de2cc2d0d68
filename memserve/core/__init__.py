"""The pure core: no I/O, no clock, no randomness; standard library, msgspec and numpy only."""
