"""One instance with a real engine in this process, and a script in the place of its hub.

A bench subclasses `Hub`: it says in `on_event` what it makes of the worker's events, and in
`on_turn`, called once between any two steps of the engine, what happens next. So it can look at
everything inside the instance at a moment when nothing else runs. Collaborators: `serve` builds the
worker of `memserve/workers/main.py`, which takes the script for its channel, and waits on it.
"""

from __future__ import annotations

import json
import os
import select
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from memserve.core.cost_model import built_in
from memserve.core.profile import LinkFit, ModelShape
from memserve.messages import Abort, AnyCommand, AnyEvent, Audit, Prefill
from memserve.types import InstanceId, RequestId, Role
from memserve.workers.environment import set_engine_environment
from memserve.workers.spec import WorkerSpec

if TYPE_CHECKING:
    from memserve.workers.main import Worker

EPOCH = 1
_NAP_S = 0.001


class Hub:
    """The worker's channel: commands that the script has put into it, and its events."""

    worker: Worker
    """Set before the first turn; not yet when the first event, `Ready`, comes."""

    def __init__(self) -> None:
        self._commands: deque[AnyCommand] = deque()
        self._wake_fds: list[int] = []
        self._is_inside_step = False

    def on_event(self, event: AnyEvent) -> None:
        """What the worker says, in the midst of its turn."""
        raise NotImplementedError

    def on_turn(self) -> None:
        """The worker is between two steps."""
        raise NotImplementedError

    def on_turn_begins(self) -> None:
        """The worker goes on, after `on_turn` and what it waited for."""

    # What a script can ask for.

    def start(
        self, name: str, token_ids: Sequence[int], max_tokens: int, *, is_private: bool = False
    ) -> None:
        """A request for so many tokens. `is_private`: it shares no KV."""
        self._commands.append(
            Prefill(
                epoch=EPOCH,
                request_id=RequestId(name),
                attempt=1,
                request=greedy_request(max_tokens),
                known_tokens=0,
                token_ids=list(token_ids),
                whole=True,
                hold=False,
                is_private=is_private,
            )
        )

    def forget(self, name: str) -> None:
        """A request is over, or has to be."""
        self._commands.append(Abort(epoch=EPOCH, request_id=RequestId(name)))

    def audit(self) -> None:
        """`Audited` comes."""
        self._commands.append(Audit(epoch=EPOCH, audit_id=1))

    @property
    def has_commands(self) -> bool:
        """Whether the worker has still to take some."""
        return bool(self._commands)

    # The channel, as the engine's loop knows it.

    def send(self, event: AnyEvent) -> None:
        self.on_event(event)

    def wait(self, timeout_s: float) -> None:
        if self._is_inside_step:
            self._sleep(timeout_s)
            return
        self.on_turn()
        self._sleep(min(timeout_s, _NAP_S))  # the script may go on by itself
        self.on_turn_begins()

    def _sleep(self, timeout_s: float) -> None:
        if not self._commands and timeout_s > 0.0:
            select.select(self._wake_fds, [], [], timeout_s)

    def receive(self) -> AnyCommand | None:
        return self._commands.popleft() if self._commands else None

    def wake_on(self, fd: int) -> None:
        self._wake_fds.append(fd)

    def close(self) -> None:
        pass

    def run(self, worker: Worker) -> None:
        """Until the script stops the worker's loop."""
        self.worker = worker
        engine, step = worker._engine, worker._engine.step

        def marked_step() -> Any:
            self._is_inside_step = True
            try:
                return step()
            finally:
                self._is_inside_step = False

        engine.step = marked_step  # type: ignore[method-assign]
        worker.run()


def serve(
    hub: Hub,
    *,
    model: str,
    device: str,
    engine: dict[str, Any],
    block_bytes: int,
    hbm_blocks: int,
    dram_blocks: int,
    tp: int = 1,
    always_swaps: bool = False,
    num_threads: int = 1,
) -> None:
    """Build the instance and run it until the hub stops its loop. Ends nothing that raises.

    `always_swaps`: reckon with a DRAM that costs nothing.
    """
    set_engine_environment(os.environ, num_threads=num_threads, log_level="warning")
    import torch
    from vllm.platforms import current_platform

    from memserve.workers.main import Worker

    torch.set_num_threads(num_threads)
    # Not torch: ranks cannot be forked from a process that has initialised CUDA.
    device_name = current_platform.get_device_name() if device == "cuda" else "cpu"
    profile = built_in(shape_of(model), device_name)
    if always_swaps:
        profile = msgspec.structs.replace(
            profile,
            links={**profile.links, "dram": LinkFit(0.0, 1e18)},
            step=msgspec.structs.replace(profile.step, floor_s=0.0),
        )
    with tempfile.TemporaryDirectory(prefix="memserve-bench-") as run_dir:
        spec = WorkerSpec(
            instance=InstanceId("PD0"),
            epoch=EPOCH,
            role=Role.COLOCATED,
            hub_address="",
            run_dir=run_dir,
            log_path="",
            model=model,
            engine=engine,
            # One block more: vLLM keeps one as its null block.
            kv_bytes=(hbm_blocks + 1) * block_bytes,
            dram_bytes=dram_blocks * block_bytes,
            profile=profile,
            num_threads=num_threads,
            device=device,
            tp=tp,
        )
        hub.run(Worker(spec, hub))  # type: ignore[arg-type]


def shape_of(model: str, dtype: str | None = None) -> ModelShape:
    """Of the model in this folder, as served in `dtype`; None: by its configuration."""
    config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    sizes = {"float32": 4, "bfloat16": 2, "float16": 2}
    return ModelShape.from_config(config, None if dtype is None else sizes[dtype])


def greedy_request(max_tokens: int) -> bytes:
    """What a worker is asked: greedy, and exactly so long."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.serial_utils import MsgpackEncoder

    request = EngineCoreRequest(
        request_id="",
        prompt_token_ids=[],
        mm_features=None,
        sampling_params=SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    return bytes(MsgpackEncoder(size_threshold=sys.maxsize).encode(request)[0])
