"""Whether an engine can follow what a request prescribes: a schema, expression, grammar, or list.

The check is vLLM's, and vLLM's libraries do it: for some input they take seconds, recurse as deep
as it nests or refers (a stack that overflows there ends the process), and raise anything. So it is
bounded: by size, by time, on threads of its own with room to recurse. Collaborators: `client.py`
asks; workers compile what has passed here, on stacks of the same size (`workers/environment.py`).

What compiles may still lead nowhere, as `{"$ref": "#"}` does: the engine says so, token by token
(`core/lifecycle.py`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from typing import TYPE_CHECKING, TypeVar

from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from memserve.errors import MemServeError, OverloadedError, RequestError
from memserve.workers.environment import GRAMMAR_STACK_BYTES

if TYPE_CHECKING:
    from vllm.tokenizers import TokenizerLike

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_CHARS = 1 << 16
"""Of a grammar: below that, none was found that a stack of `GRAMMAR_STACK_BYTES` does not bear."""
_CHECK_S = 10.0
_THREADS = 2
_MAX_REASON_CHARS = 240


class GrammarCheck:
    """vLLM's check, and the threads that it runs on."""

    def __init__(self, config: VllmConfig, tokenizer: TokenizerLike | None) -> None:
        self._model = config.model_config
        self._settings = config.structured_outputs_config
        self._tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(_THREADS, "grammar-check")

    async def check(self, wanted: StructuredOutputsParams, field: str) -> StructuredOutputsParams:
        """What the engine is to be given for it. Does not mutate.

        `field`: of the client's body, to be named in errors.
        Raises: RequestError; OverloadedError if others' checks take all the time.
        """
        checked = copy(wanted)  # vLLM fills in what it chooses; prompts of one call share theirs
        try:
            await self.run(lambda: self._verify(checked), field)
        except MemServeError:
            raise
        except Exception as error:  # whatever is wrong with it, it is the request's
            logger.debug("%s is refused", field, exc_info=error)
            raise RequestError(f"{field}: {_reason(error)}", field) from error
        return checked

    async def run(self, work: Callable[[], T], field: str) -> T:
        """Do something with a grammar. Raises: what `work` raises; as `check`, if it takes long."""
        future = self._submit(work)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), _CHECK_S)
        except TimeoutError:
            if not future.running():
                raise OverloadedError("too many grammars are being checked") from None
            raise RequestError(f"{field}: takes too long to compile", field) from None

    def close(self) -> None:
        """Forget what waits. Does not wait for what runs."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        """The pool starts its threads in `submit`, with the stack that is asked for then."""
        before = threading.stack_size(GRAMMAR_STACK_BYTES)
        try:
            return self._threads.submit(work)
        finally:
            threading.stack_size(before)

    def _verify(self, wanted: StructuredOutputsParams) -> None:
        parts = wanted.json, wanted.regex, wanted.choice, wanted.grammar, wanted.structural_tag
        for part in parts:
            if not is_short(part):
                raise ValueError(f"is too long; allowed: {MAX_CHARS} characters")
        bare = SamplingParams(structured_outputs=wanted)
        bare.verify(self._model, None, self._settings, self._tokenizer)


def is_short(part: object) -> bool:
    """Whether a check can bear it, as JSON. Stops counting where it cannot."""
    size = 0
    try:
        for piece in [part] if isinstance(part, str) else json.JSONEncoder().iterencode(part):
            size += len(piece)
            if size > MAX_CHARS:
                return False
    except RecursionError:
        return False
    return True


def _reason(error: Exception) -> str:
    """One line, however much of its input the library repeats."""
    text = " ".join(str(error.args[0] if error.args else error).split()) or type(error).__name__
    return text if len(text) <= _MAX_REASON_CHARS else text[: _MAX_REASON_CHARS - 1] + "…"
