"""OpenAI's API by vLLM's own serving objects, over `client.MemServeClient`.

Collaborators: `app.py` owns HTTP and calls one method per route; `validation.py` words the faults
of a request's body. The chat template, tokenization, tool calls, logprobs and every response are
vLLM's.

Imports vllm, and torch with it: the orchestrator imports this module in a thread.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from jinja2 import TemplateError
from pydantic import BaseModel, TypeAdapter, ValidationError
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.tokenize.protocol import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)
from vllm.entrypoints.serve.tokenize.serving import ServingTokenization
from vllm.exceptions import VLLMError
from vllm.lora.request import LoRARequest
from vllm.renderers.online_renderer import OnlineRenderer

from memserve.errors import MemServeError, StartError, UnknownModelError
from memserve.frontend.calls import Call, CallIndex
from memserve.frontend.client import MemServeClient, StreamFailed
from memserve.frontend.errors import ApiError
from memserve.frontend.grammars import MAX_CHARS, is_short
from memserve.frontend.service import Scheduler
from memserve.frontend.validation import describe
from memserve.types import Lora

logger = logging.getLogger(__name__)

_RequestT = TypeVar("_RequestT")
_Create = Callable[[Any, None], Awaitable[Any]]

# Until all of vLLM's checks raise a `VLLMError`, some faults of a request are these.
_REFUSALS = (
    VLLMError,
    ValueError,
    TypeError,
    OverflowError,
    NotImplementedError,
    TemplateError,
)
_UNSUPPORTED = ("kv_transfer_params", "ec_transfer_params", "prompt_embeds", "use_beam_search")


def build_frontend(
    model: str | Path,
    engine: dict[str, Any],
    served_name: str,
    scheduler: Scheduler,
    *,
    loras: Sequence[Lora] = (),
    request_timeout_s: float = 600.0,
    remembered_calls: int = 1024,
    max_answers: int = 128,
    tool_parser: str | None = None,
) -> Frontend:
    """Load the tokenizer and the chat template, and attach to the scheduler. Takes seconds.

    `model` is a folder or a Hugging Face id; `engine` holds the arguments for vLLM's `EngineArgs`
    that the workers have too. `loras`: adapters that are served under their own names.
    `max_answers`: of one call, for all its prompts.
    Raises: StartError.
    """
    try:
        vllm_config = EngineArgs(model=str(model), **engine).create_engine_config()
        calls = CallIndex(remembered_calls)
        client = MemServeClient(vllm_config, scheduler, calls, request_timeout_s)
    except (ValueError, TypeError, OSError) as error:
        reason = " ".join(str(error).split())  # pydantic's is a paragraph
        raise StartError(f"vLLM refuses the model or the engine settings: {reason}") from error
    scheduler.attach(client)
    return Frontend(vllm_config, client, calls, served_name, tool_parser, loras, max_answers)


class Frontend:
    """One served model: a method per route, from a decoded body to the response's bytes.

    All methods raise `ApiError` for whatever is to be told to the client.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        client: MemServeClient,
        calls: CallIndex,
        served_name: str,
        tool_parser: str | None,
        loras: Sequence[Lora],
        max_answers: int,
    ) -> None:
        self.client = client
        self.calls = calls
        self.served_name = served_name
        self._max_answers = max_answers
        reasoning_parser = vllm_config.structured_outputs_config.reasoning_parser or ""
        template: dict[str, Any] = {"chat_template": None, "chat_template_content_format": "auto"}
        tools = {"enable_auto_tools": tool_parser is not None, "tool_parser": tool_parser}
        paths = [BaseModelPath(name=served_name, model_path=served_name)]
        self._models = OpenAIServingModels(engine_client=client, base_model_paths=paths)
        # As vLLM's own `load_lora_adapter` does it for one that the engine has.
        self._models.lora_requests = {
            lora.name: LoRARequest(lora.name, lora.number, lora.path) for lora in loras
        }
        self._renderer = OnlineRenderer(
            model_config=vllm_config.model_config,
            renderer=client.renderer,
            request_logger=None,
            reasoning_parser=reasoning_parser,
            **template,
            **tools,
        )
        shared: dict[str, Any] = {
            "online_renderer": self._renderer,
            "request_logger": None,
            "enable_prompt_tokens_details": True,
        }
        self._chat = OpenAIServingChat(
            client,
            self._models,
            "assistant",
            reasoning_parser=reasoning_parser,
            **shared,
            **template,
            **tools,
        )
        self._completion = OpenAIServingCompletion(client, self._models, **shared)
        self._tokenization = ServingTokenization(self._models, self._renderer, **template)
        self._renderer.warmup()

    async def chat(self, body: object, call: Call) -> bytes | AsyncGenerator[str, None]:
        """`POST /v1/chat/completions`: the response, or its server-sent events."""
        request = await self._read(ChatCompletionRequest, body)
        _require(request.messages, "messages", "at least one message is needed")
        self._require_few(1, request.n)
        request.request_id = call.id
        call.grammar_field = _grammar_field(request)
        return await self._generate(self._chat.create_chat_completion, request, body)

    async def complete(self, body: object, call: Call) -> bytes | AsyncGenerator[str, None]:
        """`POST /v1/completions`: the response, or its server-sent events."""
        if isinstance(body, dict):  # before each is looked at
            self._require_few(_num_prompts(body.get("prompt")), 1)
        request = await self._read(CompletionRequest, body)
        _require(request.prompt, "prompt", "a text or a list of token ids is needed")
        self._require_few(_num_prompts(request.prompt), request.n)
        request.request_id = call.id
        call.grammar_field = _grammar_field(request)
        return await self._generate(self._completion.create_completion, request, body)

    async def models(self) -> bytes:
        """`GET /v1/models`."""
        listing = await self._models.show_available_models()
        for card in listing.data:
            card.owned_by = "memserve"
        return _json(listing)

    async def tokenize(self, body: object) -> bytes:
        """`POST /tokenize`: of a `prompt`, or of `messages` by the chat template."""
        is_chat = isinstance(body, dict) and "messages" in body
        kind = TokenizeChatRequest if is_chat else TokenizeCompletionRequest
        request = self._parse(kind, body)
        return _json(await self._ask(self._tokenization.create_tokenize, request))

    async def detokenize(self, body: object) -> bytes:
        """`POST /detokenize`: the text of `tokens`."""
        request = self._parse(DetokenizeRequest, body)
        return _json(await self._ask(self._tokenization.create_detokenize, request))

    def close(self) -> None:
        """Stop the tokenizer's threads."""
        self.client.shutdown()

    # ── helpers ───────────────────────────────────────────────────────────────────────────────

    async def _read(self, kind: type[_RequestT], body: object) -> _RequestT:
        """As `_parse`, in which vLLM compiles a structural tag: like any grammar, not here."""
        field = _tag_field(body)
        if field is None:
            return self._parse(kind, body)

        def parse() -> _RequestT:
            if not is_short(body[field]):  # type: ignore[index]
                message = f"{field}: is too long; allowed: {MAX_CHARS} characters"
                raise ApiError(400, message, param=field)
            return self._parse(kind, body)

        try:
            return await self.client.grammars.run(parse, field)
        except MemServeError as error:
            raise ApiError.of(error) from error

    def _parse(self, kind: type[_RequestT], body: object) -> _RequestT:
        if not isinstance(body, dict):
            raise ApiError(400, "the body is not a JSON object")
        for name in _UNSUPPORTED:
            if body.get(name):
                raise ApiError(400, f"{name}: is not supported; leave it out", param=name)
        try:
            request = TypeAdapter(kind).validate_python(body)
        except ValidationError as error:
            message, param = describe(error, body)
            raise ApiError(400, message, param=param) from error
        except _REFUSALS as error:
            raise _refusal(error) from error
        model = body.get("model")
        names = [self.served_name, *self._models.lora_requests]
        if model and model not in names:
            allowed = ", ".join(map(repr, names))
            message = f"the model {model!r} is not served here; allowed: {allowed}"
            raise ApiError.of(UnknownModelError(message, "model"))
        return request

    async def _generate(
        self, create: _Create, request: BaseModel, body: object
    ) -> bytes | AsyncGenerator[str, None]:
        try:
            result = await self._ask(create, request)
        except ApiError as error:
            if error.param == "max_tokens" and not _asks_for_nothing(body):
                raise self._no_room() from error
            raise
        if isinstance(result, BaseModel):
            return _json(result)
        stream: AsyncGenerator[str, None] = result
        return stream

    def _require_few(self, num_prompts: int, num_choices: int | None) -> None:
        """Before anything is made for each of them."""
        total, most = num_prompts * (num_choices or 1), self._max_answers
        if total > most:
            param = "prompt" if num_prompts > most else "n"
            text = f"{total} answers of one call are too many; allowed: {most}"
            raise ApiError(400, f"{param}: {text} (server.max_answers_per_call)", param=param)

    def _no_room(self) -> ApiError:
        """vLLM takes what is left of the context for the client's limit, and says it is too low."""
        limit = self.client.model_config.max_model_len
        message = f"the prompt fills the context of {limit} tokens; allowed: at most {limit - 1}"
        return ApiError(400, message)

    async def _ask(self, create: _Create, request: object) -> Any:
        try:
            result = await create(request, None)
        except StreamFailed as error:
            raise ApiError.of(error.error) from error
        except MemServeError as error:
            raise ApiError.of(error) from error
        except _REFUSALS as error:
            raise _refusal(error) from error
        if isinstance(result, ErrorResponse):
            raise _of_response(result)
        return result


def _refusal(error: Exception) -> ApiError:
    """What vLLM says of a request that it refuses."""
    logger.debug("request refused", exc_info=error)
    answer = _of_response(create_error_response(error))
    own_words = error.args[0] if error.args and isinstance(error.args[0], str) else None
    if isinstance(error, VLLMError) and own_words:  # its str() repeats the value, however long
        answer.message = own_words
    return answer


def _of_response(response: ErrorResponse) -> ApiError:
    error = response.error
    return ApiError(error.code, error.message, param=error.param)


def _require(value: object, name: str, need: str) -> None:
    if not value:
        raise ApiError(400, f"{name}: is empty; {need}", param=name)


def _num_prompts(prompt: object) -> int:
    """Of a text, a list of token ids, or a list of several of either."""
    if not isinstance(prompt, list) or not prompt or isinstance(prompt[0], int):
        return 1
    return len(prompt)


def _tag_field(body: object) -> str | None:
    """The field that holds a structural tag, if one does."""
    if not isinstance(body, dict):
        return None
    form, outputs = body.get("response_format"), body.get("structured_outputs")
    if isinstance(outputs, dict) and outputs.get("structural_tag") is not None:
        return "structured_outputs"
    is_tag = isinstance(form, dict) and form.get("type") == "structural_tag"
    return "response_format" if is_tag else None


def _grammar_field(request: ChatCompletionRequest | CompletionRequest) -> str:
    """The field that says what the output must follow, if one does."""
    return "response_format" if request.structured_outputs is None else "structured_outputs"


def _asks_for_nothing(body: object) -> bool:
    assert isinstance(body, dict)
    limits = [body.get("max_tokens"), body.get("max_completion_tokens")]
    return any(isinstance(limit, int) and limit < 1 for limit in limits)


def _json(model: BaseModel) -> bytes:
    return model.model_dump_json().encode()
