"""Prompts for tests: real English with exact token counts, the same for the same seed.

The text is the documentation that comes with Python. Random token ids would not do: the model
answers them by repeating one token, whatever its KV says.
"""

from __future__ import annotations

import random
from pathlib import Path
from pydoc_data.topics import topics

from tokenizers import Tokenizer


class Texts:
    """Slices of one long tokenized text."""

    def __init__(self, model: Path) -> None:
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        text = "\n".join(topics[name] for name in sorted(topics))
        self._ids: list[int] = tokenizer.encode(text[:300_000], add_special_tokens=False).ids

    def tokens(self, num_tokens: int, rng: random.Random) -> list[int]:
        """Consecutive tokens from a random place."""
        start = rng.randrange(len(self._ids) - num_tokens)
        return self._ids[start : start + num_tokens]
