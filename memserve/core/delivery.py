"""What the front end may pass on of one step's output for one request."""

from __future__ import annotations

import msgspec


class Delivery(msgspec.Struct, frozen=True):
    """Verdict on one `TokenOutput`, by the request's lifecycle.

    P's run ends with a finish reason that is not the request's end, and D sees P's work as cache
    hits: the front end merges both into one stream by these three answers.
    """

    tokens: bool
    """Pass the tokens (and their logprobs) on; False: drop them, D samples them itself."""
    final: bool
    """The request ends with this output; False: blank the finish reason."""
    prompt: bool
    """Pass on what is said about the prompt (cached tokens, prompt logprobs)."""
