"""What of an engine's output the client is to see, and who samples its first token."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.sampling_params import RepetitionDetectionParams, SamplingParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreOutput, FinishReason

from memserve.core.delivery import Delivery
from memserve.frontend.client import apply_delivery, needs_resampling
from tests.integration.frontend.serving import MARKS

pytestmark = MARKS


def test_apply_delivery() -> None:
    def make() -> EngineCoreOutput:
        return EngineCoreOutput(
            request_id="a",
            new_token_ids=[7],
            new_logprobs="logprobs",
            new_prompt_logprobs_tensors="prompt logprobs",
            finish_reason=FinishReason.LENGTH,
            stop_reason=7,
            prefill_stats="stats",
        )

    nothing = Delivery(tokens=False, final=False, prompt=False)
    assert apply_delivery(make(), nothing) == EngineCoreOutput(request_id="a", new_token_ids=[])
    everything = Delivery(tokens=True, final=True, prompt=True)
    assert apply_delivery(make(), everything) == make()
    from_prefill = apply_delivery(make(), Delivery(tokens=True, final=False, prompt=True))
    assert (from_prefill.new_token_ids, from_prefill.new_logprobs) == ([7], "logprobs")
    assert (from_prefill.finish_reason, from_prefill.stop_reason) == (None, None)
    assert from_prefill.prefill_stats == "stats"
    from_decode = apply_delivery(make(), Delivery(tokens=True, final=True, prompt=False))
    assert from_decode.finish_reason is FinishReason.LENGTH
    assert from_decode.prefill_stats is None
    assert from_decode.new_prompt_logprobs_tensors is None


@pytest.mark.parametrize(
    "settings",
    [
        {"structured_outputs": StructuredOutputsParams(regex="a+")},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"repetition_penalty": 1.1},
        {"min_tokens": 1},
        {"bad_words": ["no"]},
        {"seed": 0},
        {"thinking_token_budget": 3},
        {"extra_args": {"my_processor": 1}},
        {"watermarking": True},
        {"trace_decode_token_ids": [1, 2]},
        {
            "repetition_detection": RepetitionDetectionParams(
                max_pattern_size=2, min_pattern_size=1, min_count=2
            )
        },
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_needs_resampling(settings: dict[str, Any]) -> None:
    assert needs_resampling(SamplingParams(**settings))


def test_needs_no_resampling() -> None:
    assert not needs_resampling(SamplingParams())
    assert not needs_resampling(SamplingParams(temperature=0.0, seed=1))
    assert not needs_resampling(
        SamplingParams(top_p=0.5, top_k=5, logprobs=3, stop=["x"], logit_bias={1: 2.0})
    )
