"""The HTTP server: aiohttp routes, server-sent events, and the end of a call whose client left.

Collaborators: `openai.py` makes the answers (through the `Api` protocol: it imports vllm, and is
loaded after this server listens); the orchestrator answers questions about the cluster
(`service.StatusSource`).

The life of a streamed call::

    handler ── Api.chat ──▶ events ──▶ EventWriter ──▶ socket     one write per engine step
       └─ finally: CallIndex.end ──▶ scheduler.cancel             also when the client left

Its headers go out with the first event, which comes with the first token: a request that waits for
a place in vain, or fails before that, has a status of its own (429, 503, …) like one that is not
streamed. What fails later ends the stream with an event that is the error.

A client that disconnects cancels its handler (`make_runner`), which ends its call at once.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Protocol, TypeAlias

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler, Middleware

from memserve.errors import MemServeError
from memserve.frontend.calls import Call, CallIndex
from memserve.frontend.errors import ApiError
from memserve.frontend.service import StatusSource

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 << 20
WRITE_TIMEOUT_S = 60.0
"""How long a client may take nothing of what is written to it."""

_OPEN_PATHS = frozenset({"/health", "/ready"})
"""Answered without a key: probes have none."""
_CLIENT_ID = re.compile(r"[\x21-\x7e]{1,128}")
_REQUEST_ID = web.RequestKey("request_id", str)
_KEY_NAME = web.RequestKey("key_name", str)
_DONE = "data: [DONE]\n\n"

Events: TypeAlias = AsyncGenerator[str, None]


class Api(Protocol):
    """What `openai.Frontend` offers; all methods raise `ApiError`."""

    @property
    def calls(self) -> CallIndex: ...

    async def chat(self, body: object, call: Call) -> bytes | Events: ...

    async def complete(self, body: object, call: Call) -> bytes | Events: ...

    async def models(self) -> bytes: ...

    async def tokenize(self, body: object) -> bytes: ...

    async def detokenize(self, body: object) -> bytes: ...


def build_app(
    status: StatusSource,
    api: Callable[[], Api | None],
    *,
    api_keys: Sequence[str] = (),
    max_body_bytes: int = MAX_BODY_BYTES,
) -> web.Application:
    """All routes. `api` gives None until the front end is loaded; no `api_keys`: none is asked."""
    app = web.Application(
        middlewares=[_errors_as_json, _key_check(api_keys)], client_max_size=max_body_bytes
    )
    app.on_response_prepare.append(_add_request_id)
    routes = _Routes(status, api)
    app.router.add_get("/health", routes.health)
    app.router.add_get("/ready", routes.ready)
    app.router.add_get("/v1/status", routes.status)
    app.router.add_get("/v1/requests/{id}", routes.request)
    app.router.add_get("/v1/models", routes.models)
    app.router.add_post("/v1/chat/completions", routes.chat)
    app.router.add_post("/v1/completions", routes.complete)
    app.router.add_post("/tokenize", routes.tokenize)
    app.router.add_post("/detokenize", routes.detokenize)
    return app


def make_runner(app: web.Application, *, shutdown_timeout_s: float = 10.0) -> web.AppRunner:
    """A runner whose handlers are cancelled when their client leaves."""
    logging.getLogger("aiohttp.server").addFilter(_word_bad_http)  # once, however often
    return web.AppRunner(
        app, handler_cancellation=True, access_log=None, shutdown_timeout=shutdown_timeout_s
    )


class EventWriter:
    """Collects server-sent events, and writes those of one engine step at once."""

    def __init__(self, request: web.Request, response: web.StreamResponse) -> None:
        self._request = request
        self._response = response
        self._pending: list[str] = []

    def add(self, event: str) -> None:
        self._pending.append(event)

    async def flush(self) -> None:
        """Write what was added; waits while the client is behind.

        Raises: CancelledError if the client has gone, or takes nothing for too long. (No other
        error: it passes through vLLM's stream generator, which would report it as its own.)
        """
        if not self._pending:
            return
        data = self._take()
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await self._response.write(data)
        except (ConnectionError, TimeoutError) as error:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise asyncio.CancelledError("the client has gone") from error

    async def close(self) -> None:
        """Write the rest and end the response."""
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await self._response.write_eof(self._take())

    def _take(self) -> bytes:
        data = "".join(self._pending).encode()
        self._pending.clear()
        return data


class _Routes:
    def __init__(self, status: StatusSource, api: Callable[[], Api | None]) -> None:
        self._status = status
        self._api = api

    # ── generation ────────────────────────────────────────────────────────────────────────────

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, self._loaded().chat)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, self._loaded().complete)

    async def _generate(
        self,
        request: web.Request,
        create: Callable[[object, Call], Awaitable[bytes | Events]],
    ) -> web.StreamResponse:
        body = await _read_json(request)
        calls = self._loaded().calls
        call = calls.open(_client_id(request), request.get(_KEY_NAME, ""))
        call.session = _session(request, body)
        if call.client_id is None:
            request[_REQUEST_ID] = call.id
        try:
            answer = await create(body, call)
            if isinstance(answer, bytes):
                return _json_response(answer)
            return await _stream(request, answer, call)
        finally:
            calls.end(call)

    # ── about models and text ─────────────────────────────────────────────────────────────────

    async def models(self, request: web.Request) -> web.Response:
        return _json_response(await self._loaded().models())

    async def tokenize(self, request: web.Request) -> web.Response:
        return _json_response(await self._loaded().tokenize(await _read_json(request)))

    async def detokenize(self, request: web.Request) -> web.Response:
        return _json_response(await self._loaded().detokenize(await _read_json(request)))

    # ── about the cluster ─────────────────────────────────────────────────────────────────────

    async def health(self, request: web.Request) -> web.Response:
        return _json_response(b'{"status":"alive"}')

    async def ready(self, request: web.Request) -> web.Response:
        self._loaded()
        if not self._status.is_ready:
            raise _not_ready("no instance is ready to take requests")
        return _json_response(b'{"status":"ready"}')

    async def status(self, request: web.Request) -> web.Response:
        wants_audit = request.query.get("audit", "false")
        if wants_audit not in ("true", "false"):
            message = f"audit: {wants_audit!r} is not allowed; true or false"
            raise ApiError(400, message, param="audit")
        if wants_audit == "false":
            return _json_response(msgspec.json.encode(self._status.snapshot()))
        reports = await self._status.audit()
        answer = msgspec.to_builtins(self._status.snapshot())
        answer["audit"] = msgspec.to_builtins(reports)
        return _json_response(msgspec.json.encode(answer))

    async def request(self, request: web.Request) -> web.Response:
        name = request.match_info["id"]
        call = self._loaded().calls.find(name)
        found = [self._status.timeline(id) for id in call.request_ids] if call else []
        timelines = [timeline for timeline in found if timeline is not None]
        if not timelines:
            raise ApiError(404, f"the request {name!r} is not known, or not remembered any more")
        return _json_response(msgspec.json.encode({"id": name, "requests": timelines}))

    def _loaded(self) -> Api:
        api = self._api()
        if api is None:
            raise _not_ready("the tokenizer is being loaded")
        return api


async def _stream(request: web.Request, events: Events, call: Call) -> web.StreamResponse:
    """Send the events as they come. A stream that fails says so, and ends like every other.

    Raises: ApiError, and what breaks the stream, if that happens before its first event.
    """
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    )
    writer = EventWriter(request, response)
    try:
        first = await anext(events, "")
        if call.failure is not None:
            raise ApiError.of(call.failure)
        await response.prepare(request)
        call.before_wait = writer.flush
        writer.add(first)
        await _pass_on(events, call, writer)
        await writer.close()
    except (ConnectionError, TimeoutError):
        logger.debug("call %s: the client has gone", call.id)
    finally:
        await events.aclose()
    return response


async def _pass_on(events: Events, call: Call, writer: EventWriter) -> None:
    """What comes after the first event, to the end."""
    try:
        async for event in events:
            if call.failure is not None and event != _DONE:
                event = ApiError.of(call.failure).event()
            writer.add(event)
    except Exception:
        logger.exception("call %s: the stream broke", call.id)
        writer.add(ApiError(500, "internal error; the server's log says more").event())
        writer.add(_DONE)


async def _read_json(request: web.Request) -> object:
    try:
        body: object = msgspec.json.decode(await request.read())
    except msgspec.DecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply") from error
    except web.RequestPayloadError as error:
        named = request.headers.get("Content-Encoding", "none")
        message = f"the body cannot be decoded (Content-Encoding: {named})"
        # Where the next request would begin is not known.
        raise ApiError(400, message, headers={"Connection": "close"}) from error
    return body


def _client_id(request: web.Request) -> str | None:
    """The `X-Request-Id` of the client, if it is one."""
    value = request.headers.get("X-Request-Id", "")
    return value if _CLIENT_ID.fullmatch(value) else None


def _json_response(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


def _error_response(error: ApiError) -> web.Response:
    return web.Response(
        body=error.body(),
        status=error.status,
        headers=error.headers,
        content_type="application/json",
    )


def _not_ready(reason: str) -> ApiError:
    return ApiError(503, f"not ready: {reason}", headers={"Retry-After": "5"})


def _word_bad_http(record: logging.LogRecord) -> bool:
    """What is no HTTP is the client's mistake: a line, not the traceback that aiohttp logs."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError | web.RequestPayloadError):
        record.levelno, record.levelname = logging.WARNING, logging.getLevelName(logging.WARNING)
        record.msg, record.exc_info = f"{record.getMessage()}: {error!r}", None
        record.args = ()
    return True


async def _add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    request_id = _client_id(request) or request.get(_REQUEST_ID) or uuid.uuid4().hex
    response.headers.setdefault("X-Request-Id", request_id)


def _session(request: web.Request, body: object) -> str:
    """What the client calls the conversation, by `X-Session-Id` or OpenAI's `user`; or nothing."""
    named = request.headers.get("X-Session-Id", "")
    user = body.get("user") if isinstance(body, dict) else None
    return named or (user if isinstance(user, str) else "")


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error leaves as OpenAI's JSON; a fault of ours is logged here, once."""
    try:
        return await handler(request)
    except ApiError as error:
        return _error_response(error)
    except MemServeError as error:
        return _error_response(ApiError.of(error))
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return _error_response(_of_http(request, error))
    except Exception:
        logger.exception("%s %s failed", request.method, request.path)
        return _error_response(ApiError(500, "internal error; the server's log says more"))


def _of_http(request: web.Request, error: web.HTTPException) -> ApiError:
    """aiohttp's own refusals, worded."""
    where = f"{request.method} {request.path}"
    if isinstance(error, web.HTTPNotFound):
        return ApiError(404, f"{where}: there is no such route")
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods - {"HEAD"}))
        message = f"{where}: the method is not allowed; allowed: {allowed}"
        return ApiError(405, message, headers={"Allow": allowed})
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return ApiError(413, f"the body is too large: {error.text}")
    return ApiError(error.status, error.reason)


def _key_check(api_keys: Sequence[str]) -> Middleware:
    """Middleware that asks for `Authorization: Bearer <key>`, if there are keys."""
    expected = [f"Bearer {key}".encode() for key in api_keys]

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if expected and request.path not in _OPEN_PATHS:
            given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
            fits = [hmac.compare_digest(given, key) for key in expected]  # all, in constant time
            if True in fits:
                request[_KEY_NAME] = f"key {fits.index(True)}"
            else:
                message = "the API key is wrong or missing; allowed: Authorization: Bearer <key>"
                raise ApiError(401, message, headers={"WWW-Authenticate": "Bearer"})
        return await handler(request)

    return check
