"""What the engine is asked to run for a command: pure functions over vLLM's `EngineCoreRequest`.

Collaborators: `commands.py` decodes the request that the front end made and gives it to one of
these; each call changes and returns the request it was given, which nobody else holds.

The engine of P must not see the client's limits: it samples one token and stops. The engine of D
must not count the tokens that were generated elsewhere as the prompt's, so its limits shrink.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from memserve.errors import RequestError
from memserve.messages import Decode, Prefill


def prefill_request(
    request: EngineCoreRequest,
    command: Prefill,
    token_ids: Sequence[int],
    engine_id: str,
    cache_salt: str | None,
) -> EngineCoreRequest:
    """The prompt `token_ids` and one token, or the whole request.

    Raises: RequestError if no token is left to generate, or it is not a text generation request.
    """
    params = _place(request, engine_id, token_ids, cache_salt)
    if command.num_generated:
        _drop_prompt_logprobs(params)  # the client has them
    if command.whole:
        _shrink_limits(params, command.num_generated)
        return request
    params.max_tokens = 1
    params.min_tokens = 0
    if command.resample:  # the token is thrown away, so nothing needs to steer it
        params.structured_outputs = None
        params.logprobs = None
        params.logprob_token_ids = None
        params.bad_words = []
        params._bad_words_token_ids = None
        params.thinking_token_budget = None
        params.repetition_detection = None
    return request


def decode_request(
    request: EngineCoreRequest,
    command: Decode,
    token_ids: Sequence[int],
    engine_id: str,
    cache_salt: str | None,
) -> EngineCoreRequest:
    """Generate after `token_ids`: the prompt and the tokens that were generated elsewhere.

    Raises: RequestError if no token is left to generate, or it is not a text generation request.
    """
    params = _place(request, engine_id, token_ids, cache_salt)
    _drop_prompt_logprobs(params)
    _shrink_limits(params, command.num_generated)
    return request


def _place(
    request: EngineCoreRequest, engine_id: str, token_ids: Sequence[int], cache_salt: str | None
) -> SamplingParams:
    """Fill in what does not depend on the kind of command."""
    params = request.sampling_params
    if params is None:
        raise RequestError("the request generates nothing (no sampling parameters)")
    request.request_id = engine_id
    request.prompt_token_ids = list(token_ids)
    request.cache_salt = cache_salt
    request.client_index = 0
    request.current_wave = 0
    params.n = 1  # the front end makes one request per sequence
    if params.extra_args:
        # These would reach vLLM's own transfer machinery; here the hub alone says what travels.
        params.extra_args.pop("kv_transfer_params", None)
        params.extra_args.pop("ec_transfer_params", None)
    return params


def _shrink_limits(params: SamplingParams, num_generated: int) -> None:
    if params.max_tokens is not None:
        if params.max_tokens <= num_generated:
            raise RequestError(
                f"{num_generated} tokens are generated already, of {params.max_tokens} allowed"
            )
        params.max_tokens -= num_generated
    params.min_tokens = max(0, params.min_tokens - num_generated)


def _drop_prompt_logprobs(params: SamplingParams) -> None:
    """Without them, the prompt's KV may come out of the cache."""
    if params.prompt_logprobs is None and params.prompt_logprob_token_ids is None:
        return
    params.prompt_logprobs = None
    params.prompt_logprob_token_ids = None
    params.prompt_logprob_start = None
    params.skip_reading_prefix_cache = False
