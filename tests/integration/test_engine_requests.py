"""What the engine is asked to run for a command."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequest

from memserve.errors import RequestError
from memserve.types import Namespace
from memserve.workers.compat import EngineCodec, complete_tokens
from memserve.workers.requests import decode_request, prefill_request
from tests.contract.transfer_rig import make_hasher, prompt
from tests.integration.loop_rig import decode, prefill
from tests.integration.worker_harness import request_bytes


def front_end_request(**params: Any) -> EngineCoreRequest:
    """As it arrives: through vLLM's codec, which runs the parameters' own checks again."""
    return EngineCodec().decode_request(request_bytes(**{"max_tokens": 20, **params}))


def params_of(request: EngineCoreRequest) -> SamplingParams:
    assert request.sampling_params is not None
    return request.sampling_params


def test_prefill_samples_one_token_whatever_the_client_asked() -> None:
    """Limits of the client do not reach P."""
    request = front_end_request(
        min_tokens=5, logprobs=2, prompt_logprobs=1, stop_token_ids=[9], logit_bias={3: 1.0}
    )
    params = params_of(prefill_request(request, prefill([1, 2]), [1, 2], "r/1", "salt"))
    assert (params.max_tokens, params.min_tokens, params.n) == (1, 0, 1)
    assert (params.logprobs, params.prompt_logprobs) == (2, 1)  # 37, 38: they come from P
    assert params.skip_reading_prefix_cache
    assert params.stop_token_ids == [9]  # 41: a stop token as the very first token
    assert params.logit_bias == {3: 1.0}
    assert (request.request_id, request.cache_salt) == ("r/1", "salt")
    assert request.prompt_token_ids == [1, 2]


def test_prefill_whose_token_is_dropped_has_no_grammar() -> None:
    grammar = StructuredOutputsParams(json={"type": "object"})
    request = front_end_request(structured_outputs=grammar, logprobs=2, prompt_logprobs=0)
    params = params_of(prefill_request(request, prefill([1], resample=True), [1], "r/1", None))
    assert params.structured_outputs is None
    assert params.logprobs is None
    assert params.prompt_logprobs == 0


def test_whole_request_keeps_its_limits_less_what_was_generated() -> None:
    command = prefill([1, 2, 3], whole=True, num_generated=2)
    request = front_end_request(min_tokens=3, prompt_logprobs=1)
    params = params_of(prefill_request(request, command, command.token_ids, "r/2", None))
    assert (params.max_tokens, params.min_tokens) == (18, 1)
    assert params.prompt_logprobs is None  # the client has them from the first attempt
    assert not params.skip_reading_prefix_cache

    request = front_end_request(min_tokens=3, prompt_logprobs=1)
    params = params_of(prefill_request(request, prefill([1], whole=True), [1], "r/1", None))
    assert (params.max_tokens, params.min_tokens, params.prompt_logprobs) == (20, 3, 1)


def test_decode_reads_the_cache_and_counts_what_was_generated() -> None:
    request = front_end_request(min_tokens=2, prompt_logprobs=1, logprobs=4)
    params = params_of(decode_request(request, decode([], num_generated=3), [1, 2], "r/1", None))
    assert (params.max_tokens, params.min_tokens) == (17, 0)
    assert params.prompt_logprobs is None
    assert params.skip_reading_prefix_cache is False
    assert params.logprobs == 4


def test_client_cannot_speak_to_vllm_s_own_transfers() -> None:
    extra = {"kv_transfer_params": {"do_remote_prefill": True}, "mine": 1}
    request = front_end_request(extra_args=extra)
    params = params_of(prefill_request(request, prefill([1]), [1], "r/1", None))
    assert params.extra_args == {"mine": 1}


@pytest.mark.parametrize("num_generated", [20, 21])
def test_nothing_left_to_generate_is_an_error(num_generated: int) -> None:
    with pytest.raises(RequestError, match="of 20 allowed"):
        decode_request(
            front_end_request(), decode([], num_generated=num_generated), [1], "r/1", None
        )


def test_request_that_generates_nothing_is_an_error() -> None:
    request = front_end_request()
    request.sampling_params = None
    with pytest.raises(RequestError, match="generates nothing"):
        prefill_request(request, prefill([1]), [1], "r/1", None)


@pytest.mark.parametrize(
    ("computed", "in_flight", "complete"),
    [(0, 0, 0), (9, 0, 9), (10, 1, 9), (10, 0, 9), (7, 7, 0), (0, 4, 0)],
)
def test_kv_of_steps_in_flight_is_not_complete(
    computed: int, in_flight: int, complete: int
) -> None:
    request = make_hasher()(prompt(8), Namespace())
    request.append_output_token_ids([1, 2])
    request.num_computed_tokens = computed
    request.num_in_flight_tokens = in_flight
    assert complete_tokens(request) == complete
