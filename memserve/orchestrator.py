"""`memserve up`: builds the parts, runs them in one event loop, and takes them down in order.

    Orchestrator ── Hub ⇄ workers            channel.py
        ├── ClusterManager ⇄ zygote          cluster.py
        ├── GlobalScheduler                  scheduler.py
        └── HTTP server, front end           frontend/

This process never initialises an accelerator. vLLM is imported only for the front end, in a thread,
while the workers start.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import uvloop
from aiohttp import web

from memserve import profiles, run_dirs
from memserve.channel import Hub
from memserve.cluster import ClusterManager, ClusterSettings
from memserve.config import (
    Config,
    caching_in_force,
    engine_settings,
    gpu_plan,
    link_in_force,
    mode_in_force,
    tp_in_force,
)
from memserve.core.cost_model import CostModel
from memserve.core.gpu_plan import describe_plan
from memserve.core.profile import Profile
from memserve.core.timeline import RequestTimeline
from memserve.core.vocabulary import Seat
from memserve.errors import ConfigError, MemServeError, StartError
from memserve.frontend.app import build_app, make_runner
from memserve.loras import engine_arguments, find_loras
from memserve.messages import (
    AnyEvent,
    Audited,
    Heartbeat,
    LinkReady,
    Ready,
    StartFailed,
    Stop,
    StopAsked,
)
from memserve.models import resolve_model
from memserve.progress import Progress
from memserve.scheduler import GlobalScheduler
from memserve.scheduler_settings import scheduler_settings
from memserve.status import AuditReport, Costs, Snapshot
from memserve.tui import live_view
from memserve.types import Caching, Lora, RequestId, Role
from memserve.worker_specs import WorkerSpecs
from memserve.workers.environment import set_engine_environment

if TYPE_CHECKING:
    from memserve.frontend.openai import Frontend

logger = logging.getLogger(__name__)

_TREE_CHECK_S = 10.0
"""How long an instance may take to say what it holds, in an audit."""
_OPEN_FILES = 1 << 16
"""So many at most are asked for."""
_TICK_S = 0.5
"""How often deadlines are looked at."""
_STOP_WAIT_S = 1.0
"""From a worker's SIGTERM to its end: this process's own, if all were sent one, comes before."""


def run(config: Config, progress: Progress, *, show_live_view: bool = False) -> int:
    """Serve until a signal ends it; the exit code: 0, 1 for what failed, 2 for a user's mistake.

    Errors that a user can mend are shown as one line, through `progress`.
    """
    logging.basicConfig(
        level=config.server.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    _allow_many_connections()
    orchestrator = Orchestrator(config, progress)
    exit_code = 0
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(orchestrator.run(show_live_view=show_live_view))
    except* MemServeError as errors:
        for error in _leaves(errors):
            progress.failed(str(error))
            exit_code = max(exit_code, 2 if isinstance(error, ConfigError) else 1)
    return exit_code


class Orchestrator:
    """One run of `memserve up`. It answers the front end's questions about the cluster."""

    def __init__(self, config: Config, progress: Progress) -> None:
        self._config = config
        self._progress = progress
        self._mode = mode_in_force(config)
        self._caching = caching_in_force(config)
        self._started_at = time.monotonic()
        self._front_end: Frontend | None = None
        self._loras: list[Lora] = []
        self._stop_asked = asyncio.Event()
        """The first signal: finish what is running."""
        self._abort_asked = asyncio.Event()
        """The second one: do not."""

    async def run(self, *, show_live_view: bool) -> None:
        """Start everything, serve until a signal, stop everything.

        Raises: MemServeError, alone or in a group, if it could not start.
        """
        self._handle_signals()
        self._loras = find_loras(self._config.models.loras, self._config.served_name)
        with _listen(self._config.server.host, self._config.server.port) as listener:
            model = await asyncio.to_thread(
                resolve_model, self._config.models.model, self._progress.note
            )
            with run_dirs.own() as run_dir:
                await self._serve(str(model), run_dir, listener, show_live_view)

    # ── what the front end may ask (frontend/service.py: StatusSource) ────────────────────────

    @property
    def is_ready(self) -> bool:
        """Whether a request could be placed now."""
        return self._scheduler.is_ready

    def snapshot(self) -> Snapshot:
        """The cluster at this moment."""
        return Snapshot(
            model=self._config.served_name,
            mode=str(self._mode),
            caching=self._caching.value,
            device=self._config.cluster.device,
            is_ready=self.is_ready and self._front_end is not None,
            uptime_s=time.monotonic() - self._started_at,
            instances=self._cluster.statuses(),
            links=self._scheduler.links(self._cluster.link_kinds),
            counters=self._scheduler.counters(),
            costs=_costs(self._cost),
        )

    def timeline(self, request_id: RequestId) -> RequestTimeline | None:
        """What happened to a request, as long as it is remembered."""
        return self._scheduler.timeline(request_id)

    async def audit(self) -> list[AuditReport]:
        """Every instance's own accounting of its pool, and what the prompt tree has wrong of it."""
        reports = await self._cluster.audit()
        checks = self._scheduler.check_trees()
        if checks:
            await asyncio.wait(checks.values(), timeout=_TREE_CHECK_S)
        return [
            msgspec.structs.replace(
                report, problems=report.problems + _tree_problems(checks.get(report.instance))
            )
            for report in reports
        ]

    # ── the run ───────────────────────────────────────────────────────────────────────────────

    async def _serve(
        self, model: str, run_dir: Path, listener: socket.socket, show_live_view: bool
    ) -> None:
        profiles.check_tp(self._config, model)
        profile = await asyncio.to_thread(profiles.for_config, self._config, model)
        profiles.check_links(self._config, profile)
        if (plan := gpu_plan(self._config)) is not None:
            self._progress.note(describe_plan(plan))
        hub = Hub(run_dir, self._on_event)
        hub.open()
        self._send = hub.send
        self._build(model, run_dir, hub, profile)
        app = build_app(self, lambda: self._front_end, api_keys=self._config.api_keys)
        runner = make_runner(app)
        try:
            await self._cluster.open()
            async with asyncio.TaskGroup() as tasks:
                background = [
                    tasks.create_task(work)
                    for work in (hub.serve(), self._cluster.watch(), self._tick())
                ]
                try:
                    await runner.setup()
                    await web.SockSite(runner, listener).start()
                    if await self._unless_stopped(self._start(model)):
                        await self._until_stopped(listener, show_live_view)
                finally:
                    await self._drain()
                    await runner.cleanup()
                    await self._cluster.stop()
                for task in background:
                    task.cancel()
        finally:
            if self._front_end is not None:
                self._front_end.close()
            hub.close()

    def _build(self, model: str, run_dir: Path, hub: Hub, profile: Profile) -> None:
        """The scheduler and the cluster manager; nothing runs yet."""
        config, roles = self._config, dict(self._mode.instances())
        # What prompts are compared by; queues and decode steps are reckoned at each one's degree.
        tp_of = tp_in_force(config)
        tp = next(tp_of[instance] for instance, role in roles.items() if role is not Role.DECODE)
        self._cost = CostModel(profile, tp)
        settings = scheduler_settings(config, self._caching, link_in_force(config))
        self._scheduler = GlobalScheduler(
            msgspec.structs.replace(settings, tp_of=tp_of),
            roles,
            hub.send,
            time.monotonic,
            self._cost,
        )
        specs = WorkerSpecs(
            config,
            model=model,
            loras=self._loras,
            profile=profile,
            run_dir=run_dir,
            hub_address=hub.address,
        )
        self._cluster = ClusterManager(
            cluster_settings(config, self._caching),
            roles,
            specs.make,
            run_dir=run_dir,
            environment=specs.environment(),
            members=self._scheduler,
            send=hub.send,
            watcher=self._progress,
            clock=time.monotonic,
        )

    async def _start(self, model: str) -> None:
        """Workers and front end at the same time; each takes seconds of imports."""
        async with asyncio.TaskGroup() as tasks:  # the first error ends the other one's wait
            loading = tasks.create_task(asyncio.to_thread(self._load_front_end, model))
            tasks.create_task(self._cluster.start())
        self._front_end = loading.result()

    def _load_front_end(self, model: str) -> Frontend:
        # What vLLM says while it is imported is about engines; this process has none.
        wants_all = self._config.server.log_level == "debug"
        level = "debug" if wants_all else "error"
        set_engine_environment(os.environ, num_threads=1, log_level=level)
        logging.getLogger("vllm").setLevel(level.upper())
        from memserve.frontend.openai import build_frontend  # imports vllm: seconds

        return build_frontend(
            model,
            self._engine_settings(),
            self._config.served_name,
            self._scheduler,
            loras=self._loras,
            request_timeout_s=self._config.server.request_timeout_s,
            remembered_calls=self._config.scheduler.timeline_requests,
            max_answers=self._config.server.max_answers_per_call,
        )

    def _engine_settings(self) -> dict[str, Any]:
        """What is configured has the last word on how many adapters, and of which rank."""
        return engine_arguments(self._loras) | engine_settings(self._config)

    async def _until_stopped(self, listener: socket.socket, show_live_view: bool) -> None:
        host, port = listener.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        has_key = bool(self._config.api_keys)
        self._progress.ready(url, self._config.served_name, has_api_key=has_key)
        if show_live_view:
            await live_view(self.snapshot, self._stop_asked, address=url)
        await self._stop_asked.wait()

    async def _unless_stopped(self, work: Coroutine[Any, Any, None]) -> bool:
        """Whether `work` came to its end before a signal."""
        working = asyncio.create_task(work)
        stopped = asyncio.create_task(self._stop_asked.wait())
        try:
            await asyncio.wait({working, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
            return working.done()
        finally:
            working.cancel()
            stopped.cancel()
            await asyncio.gather(working, stopped, return_exceptions=True)

    async def _drain(self) -> None:
        """Let running requests end, up to the deadline or a second signal; then abort them."""
        self._scheduler.close()
        if self._scheduler.num_served:
            self._progress.note(f"waiting for {self._scheduler.num_served} running requests")
        waits = [
            asyncio.create_task(event.wait()) for event in (self._scheduler.idle, self._abort_asked)
        ]
        grace_s = self._config.server.shutdown_grace_s
        await asyncio.wait(waits, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        self._scheduler.fail_all("the server has shut down")

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._cluster.tick()
            self._scheduler.tick()

    # ── small parts ───────────────────────────────────────────────────────────────────────────

    def _on_event(self, seat: Seat, event: AnyEvent) -> None:
        if not self._cluster.is_current(seat):
            return
        if isinstance(event, StopAsked):
            asyncio.get_running_loop().call_later(_STOP_WAIT_S, self._stop_worker, seat)
        elif isinstance(event, Ready | StartFailed | Heartbeat | LinkReady | Audited):
            self._cluster.on_event(seat, event)
            if isinstance(event, Heartbeat):
                self._scheduler.on_stats(seat, event.stats)
        else:
            self._scheduler.on_event(seat, event)

    def _stop_worker(self, seat: Seat) -> None:
        """It was sent SIGTERM: it ends in order, and is started again, unless all were sent one."""
        if not self._stop_asked.is_set() and self._cluster.is_current(seat):
            self._send(seat, Stop(epoch=seat.epoch))

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if self._stop_asked.is_set():
            self._abort_asked.set()
        self._stop_asked.set()


def _allow_many_connections() -> None:
    """Each client takes a descriptor; shells give 1,024, and mostly let a process have more."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if most == resource.RLIM_INFINITY else min(most, _OPEN_FILES)
    if now != resource.RLIM_INFINITY and now < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def cluster_settings(config: Config, caching: Caching) -> ClusterSettings:
    """The cluster manager's part of the configuration."""
    return ClusterSettings(
        start_timeout_s=config.cluster.start_timeout_s,
        heartbeat_timeout_s=config.cluster.heartbeat_timeout_s,
        max_restarts=config.cluster.max_restarts,
        restart_window_s=config.cluster.restart_window_s,
        may_fetch=caching.fetches,
    )


def _costs(cost: CostModel) -> Costs:
    profile = cost.profile
    return Costs(
        profile=profile.describe(),
        is_calibrated=profile.is_calibrated,
        reduce=profile.reduce.source,
        error=profile.error,
        device_factor=cost.device_factor,
        host_factor=cost.host_factor,
    )


def _listen(host: str, port: int) -> socket.socket:
    """Taken first of all, so that a port in use is known before anything is started.

    Raises: StartError.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.setblocking(False)
    except OSError as error:
        reason = error.strerror or str(error)
        raise StartError(
            f"cannot listen on {host}:{port} (server.host, server.port): {reason}"
        ) from error
    return listener


def _tree_problems(check: asyncio.Future[list[str]] | None) -> list[str]:
    """What a comparison of the prompt tree with an instance has brought."""
    if check is None or check.cancelled():
        return []
    if not check.done():
        return [f"the instance did not say what it holds within {_TREE_CHECK_S:g} s"]
    return check.result()


def _leaves(group: BaseExceptionGroup[MemServeError]) -> list[MemServeError]:
    """The errors of a group of groups."""
    leaves: list[MemServeError] = []
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            leaves += _leaves(error)
        else:
            leaves.append(error)
    return leaves
