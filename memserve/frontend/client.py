"""vLLM's `EngineClient` over the global scheduler: `generate` in, one merged stream out.

Collaborators: `openai.py` builds it and gives it to vLLM's serving objects, which call `generate`;
the scheduler (`service.Scheduler`) runs the requests and calls `on_step` and `on_error`; vLLM's
`InputProcessor` validates all but grammars (`grammars.py`), its `OutputProcessor` detokenizes and
looks for stop strings. What of a P's and a D's output belongs to the client was decided by the
lifecycle (`core/delivery.py`); here it is only carried out.

Imports vllm, and torch with it: the orchestrator imports this module in a thread.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Iterable, Mapping
from copy import copy
from http import HTTPStatus
from typing import Any, NoReturn

from vllm.config import VllmConfig
from vllm.engine.protocol import EngineClient
from vllm.exceptions import GenerationError
from vllm.outputs import RequestOutput
from vllm.renderers.inputs.preprocess import extract_prompt_components
from vllm.sampling_params import SamplingParams, SamplingType
from vllm.tasks import SupportedTask
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from memserve.core.delivery import Delivery
from memserve.core.vocabulary import RequestSpec
from memserve.errors import DeadlineError, MemServeError, RequestError
from memserve.frontend.calls import Call, CallIndex
from memserve.frontend.errors import ApiError
from memserve.frontend.grammars import GrammarCheck
from memserve.frontend.service import Scheduler
from memserve.types import Namespace, RequestId

logger = logging.getLogger(__name__)

_ONE_BUFFER = 1 << 62
"""Arrays of any size are encoded in line: a message is one frame."""


class StreamFailed(GenerationError):
    """One of our errors, in the form that vLLM's stream generators end a stream with."""

    def __init__(self, error: MemServeError) -> None:
        super().__init__(str(error))
        self.error = error
        self.status_code: HTTPStatus = ApiError.of(error).status


def needs_resampling(params: SamplingParams) -> bool:
    """Whether a sampled token depends on the tokens generated before it, beyond the context.

    Then D has to sample the first token itself: it would take P's for a part of the prompt, and
    its grammar, counts, or random generator would start one token late.
    """
    extra = (params.extra_args or {}).keys()
    return bool(
        params.structured_outputs is not None
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
        or params.min_tokens
        or params.bad_words
        or params.thinking_token_budget is not None
        or params.repetition_detection is not None
        or params.trace_decode_token_ids
        or params.watermarking
        or params.sampling_type is SamplingType.RANDOM_SEED
        or extra  # what custom logits processors make of it is unknown
    )


def apply_delivery(output: EngineCoreOutput, delivery: Delivery) -> EngineCoreOutput:
    """Leave of one request's output what its client is to see. Changes and returns `output`."""
    output.kv_transfer_params = None
    if not delivery.tokens:
        output.new_token_ids = []
        output.new_logprobs = None
        output.new_sampling_mask = None
        output.routed_experts = None
    if not delivery.final:
        output.finish_reason = None
        output.stop_reason = None
    if not delivery.prompt:
        output.prefill_stats = None
        output.new_prompt_logprobs_tensors = None
        output.prompt_token_id_logprobs = None
    return output


class _Run:
    """One `generate`: a request, or the `n` children of one. Ends exactly once."""

    def __init__(self, request: EngineCoreRequest) -> None:
        params = request.params
        self.id = request.request_id
        self.queue = RequestOutputCollector(params.output_kind, request.request_id)
        self.parent = ParentRequest(request) if params.n > 1 else None
        self.requests = [request] if self.parent is None else _children(request, self.parent)
        self.timer: asyncio.TimerHandle | None = None
        self.is_over = False


def _children(request: EngineCoreRequest, parent: ParentRequest) -> list[EngineCoreRequest]:
    children = []
    for index in range(parent.n):
        child = copy(request)
        child.request_id, child.sampling_params = parent.get_child_info(index)
        children.append(child)
    return children


class MemServeClient(EngineClient):
    """The engine, as vLLM's serving objects see it: instances of it may be anywhere.

    `request_timeout_s`: from submission to the last token. All methods run on the event loop.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        scheduler: Scheduler,
        calls: CallIndex,
        request_timeout_s: float,
    ) -> None:
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.input_processor = InputProcessor(vllm_config)
        self.input_processor.structured_outputs_config = None  # they are checked apart
        self.renderer = self.input_processor.renderer
        self.grammars = GrammarCheck(vllm_config, self.renderer.tokenizer)
        self.output_processor = OutputProcessor(
            self.renderer.tokenizer,
            log_stats=False,
            stream_interval=vllm_config.scheduler_config.stream_interval,
        )
        self._scheduler = scheduler
        self._calls = calls
        self.request_timeout_s = request_timeout_s
        self._encoder = MsgpackEncoder(size_threshold=_ONE_BUFFER)
        self._decoder = MsgpackDecoder(EngineCoreOutputs)

    @property
    def num_unfinished(self) -> int:
        """Requests whose clients still wait for output."""
        num_unfinished: int = self.output_processor.get_num_unfinished_requests()
        return num_unfinished

    # ── requests ──────────────────────────────────────────────────────────────────────────────

    def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        prompt_text: str | None = None,
        lora_request: Any = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        kv_hints: Any = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Submit a rendered prompt now; its outputs come from the generator that is returned.

        The generator need not be iterated: ending its call (`CallIndex.end`) frees everything.
        A request whose output must follow a grammar is submitted by its generator, after the check.
        Raises: RequestError and vLLM's validation errors if the request cannot be served,
        UnavailableError if no instance can take it, OverloadedError if too many wait.
        """
        if not isinstance(prompt, dict) or "type" not in prompt:
            raise TypeError("the prompt is not rendered")
        if (sampling_params.extra_args or {}).get("kv_transfer_params"):
            raise RequestError("kv_transfer_params are not supported")
        request = self.input_processor.process_inputs(
            request_id,
            prompt,
            sampling_params,
            supported_tasks=("generate",),
            lora_request=lora_request,
            trace_headers=trace_headers,
            priority=priority,
            session_id=session_id,
        )
        _refuse_other_than_text(request)
        request.reasoning_ended = reasoning_ended
        request.reasoning_parser_kwargs = reasoning_parser_kwargs
        request.external_req_id = request_id
        request.request_id = secrets.token_hex(8)
        text = extract_prompt_components(self.model_config, prompt).text
        call = self._calls.serving(request_id) or Call(request_id, None)
        if sampling_params.structured_outputs is not None:
            return self._outputs_once_checked(request, call, text)
        run = _Run(request)
        self._start(run, call, text)
        return self._outputs(run, call)

    async def _outputs_once_checked(
        self, request: EngineCoreRequest, call: Call, text: str | None
    ) -> AsyncGenerator[RequestOutput, None]:
        params = request.params
        try:
            params.structured_outputs = await self.grammars.check(
                params.structured_outputs, call.grammar_field
            )
            if call.is_over:
                return
            run = _Run(request)
            self._start(run, call, text)
        except MemServeError as error:
            call.failure = error
            raise StreamFailed(error) from error
        async for output in self._outputs(run, call):
            yield output

    def _start(self, run: _Run, call: Call, text: str | None) -> None:
        loop = asyncio.get_running_loop()
        error = DeadlineError(f"the request took longer than {self.request_timeout_s:g} s")
        run.timer = loop.call_later(self.request_timeout_s, run.queue.put, error)
        call.endings.append(lambda: self._end(run))
        try:
            for index, request in enumerate(run.requests):
                self.output_processor.add_request(request, text, run.parent, index, run.queue)
            for request in run.requests:
                call.request_ids.append(RequestId(request.request_id))
                self._scheduler.submit(self._spec(request, call))
        except BaseException:
            self._end(run)
            raise

    def _spec(self, request: EngineCoreRequest, call: Call) -> RequestSpec:
        params = request.sampling_params
        token_ids = request.prompt_token_ids
        assert params is not None and params.max_tokens is not None and token_ids is not None
        bare = copy(request)
        bare.prompt_token_ids = []
        (encoded,) = self._encoder.encode(bare)
        lora = request.lora_request
        room = self.model_config.max_model_len - len(token_ids)
        return RequestSpec(
            id=RequestId(request.request_id),
            prompt_token_ids=token_ids,
            request=bytes(encoded),
            max_tokens=min(params.max_tokens, room),
            resample=needs_resampling(params) or bool(self.model_config.logits_processors),
            namespace=Namespace(request.cache_salt, lora and lora.lora_name),
            client=call.key_name,
            priority=request.priority,
            session=call.session,
            grammar_field=call.grammar_field if params.structured_outputs is not None else None,
        )

    async def _outputs(self, run: _Run, call: Call) -> AsyncGenerator[RequestOutput, None]:
        try:
            is_finished = False
            held: RequestOutput | None = None
            while not is_finished:
                output = run.queue.get_nowait()
                if output is None:
                    await call.before_wait()
                    output = await run.queue.get()
                is_finished = output.finished
                if held is not None:
                    held.add(output, aggregate=True)
                    output = held
                held = None if is_finished or _has_tokens(output) else output
                if held is None:
                    yield output
        except MemServeError as error:
            call.failure = error
            raise StreamFailed(error) from error
        finally:
            self._end(run)

    def _end(self, run: _Run) -> None:
        """Forget the run; whatever of it is not complete is cancelled."""
        if run.is_over:
            return
        run.is_over = True
        if run.timer is not None:
            run.timer.cancel()
        for request_id in self.output_processor.abort_requests([run.id], internal=True):
            self._scheduler.cancel(RequestId(request_id))

    # ── the scheduler's side (`service.OutputSink`) ───────────────────────────────────────────

    def on_step(self, payload: bytes, deliveries: Mapping[RequestId, Delivery]) -> None:
        """One engine step's `EngineCoreOutputs`; requests without a delivery are ignored.

        An output that cannot be made sense of fails its step's requests, and nothing else.
        """
        try:
            to_stop = self._process(payload, deliveries)
        except Exception:
            logger.exception("the outputs of an engine step cannot be read")
            for request_id in deliveries:
                self.on_error(request_id, MemServeError("an engine's output cannot be read"))
            return
        for stopped in to_stop:
            self._scheduler.stop(RequestId(stopped))

    def _process(self, payload: bytes, deliveries: Mapping[RequestId, Delivery]) -> list[str]:
        """Put the step's outputs into their streams; whose stop string was seen."""
        # torch asks for writable memory below the tensors that it decodes.
        step: EngineCoreOutputs = self._decoder.decode(bytearray(payload))
        outputs = [
            apply_delivery(output, delivery)
            for output in step.outputs
            if (delivery := deliveries.get(RequestId(output.request_id))) is not None
        ]
        to_stop: list[str] = self.output_processor.process_outputs(
            outputs, step.timestamp
        ).reqs_to_abort
        return to_stop

    def on_error(self, request_id: RequestId, error: MemServeError) -> None:
        """The request has failed: its client's stream ends with the error."""
        state = self.output_processor.request_states.get(request_id)
        if state is not None and state.queue is not None:
            state.queue.put(error)

    # ── the rest of `EngineClient` ────────────────────────────────────────────────────────────

    @property
    def is_running(self) -> bool:
        return True

    @property
    def is_stopped(self) -> bool:
        return False

    @property
    def errored(self) -> bool:
        return False

    @property
    def dead_error(self) -> BaseException:
        error: BaseException = GenerationError("the front end does not die of its instances")
        return error

    async def get_supported_tasks(self) -> tuple[SupportedTask, ...]:
        return ("generate",)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """By the ids given to `generate`."""
        request_ids = [request_id] if isinstance(request_id, str) else list(request_id)
        for aborted in self.output_processor.abort_requests(request_ids, internal=False):
            self._scheduler.cancel(RequestId(aborted))

    async def is_tracing_enabled(self) -> bool:
        return False

    async def check_health(self) -> None:
        return

    async def do_log_stats(self) -> None:
        return

    async def is_sleeping(self) -> bool:
        return False

    async def is_paused(self) -> bool:
        return False

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop the threads of the tokenizer and of the checks."""
        self.grammars.close()
        self.renderer.shutdown()

    def encode(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError("MemServe serves generating models only")

    async def notify_kv_transfer_request_rejected(self, *args: Any, **kwargs: Any) -> None:
        """No client holds KV: `generate` refuses `kv_transfer_params`."""

    async def _unsupported(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError("the cluster's instances are not steered through this client")

    start_profile = stop_profile = _unsupported
    reset_mm_cache = reset_encoder_cache = reset_prefix_cache = _unsupported
    sleep = wake_up = release_kv_cache_memory = _unsupported
    add_lora = pause_generation = resume_generation = _unsupported


def _has_tokens(output: RequestOutput) -> bool:
    """What P says of the prompt alone is no beginning: what fails before the first token has no
    stream yet, and gets a status."""
    return any(choice.token_ids for choice in output.outputs)


def _refuse_other_than_text(request: EngineCoreRequest) -> None:
    """Prompts are known by their tokens alone: in the trees, and in what travels to workers."""
    if request.mm_features or request.prompt_embeds is not None or not request.prompt_token_ids:
        raise RequestError("images, audio, video and prompt_embeds are not supported; only text")
