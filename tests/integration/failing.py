"""Instances that are killed or stopped, and streams that are watched meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import psutil

from memserve.status import InstanceStatus
from memserve.types import InstanceState
from tests.integration.api_client import Client, until_async
from tests.integration.reference import Job

BACK_S = 60.0
"""For an instance to be ready again: some seconds on an idle machine."""


async def instance_of(client: Client, id: str) -> InstanceStatus:
    return next(i for i in (await client.status()).instances if i.id == id)


async def signal_instance(client: Client, id: str, number: signal.Signals) -> InstanceStatus:
    """Signal an instance's process; its status before that."""
    instance = await instance_of(client, id)
    assert instance.pid is not None
    os.kill(instance.pid, number)
    if number is signal.SIGSTOP:
        process = psutil.Process(instance.pid)

        async def is_stopped() -> bool:
            return process.status() == psutil.STATUS_STOPPED

        await until_async(is_stopped, f"{id} is stopped", 10)
    return instance


async def until_back(client: Client, before: InstanceStatus) -> None:
    """The instance is in its next life."""

    async def is_back() -> bool:
        now = await instance_of(client, before.id)
        return now.epoch == before.epoch + 1 and now.state is InstanceState.READY

    await until_async(is_back, f"{before.id} is ready again", BACK_S, every_s=0.1)
    now = await instance_of(client, before.id)
    assert now.restarts == before.restarts + 1
    assert now.pid != before.pid


class Stream:
    """A stream that runs in a task, and that can be waited for at any token."""

    def __init__(self, client: Client, job: Job, call_id: str, **extra: Any) -> None:
        self.call_id = call_id
        self.token_ids: list[int] = []
        self._events = client.events(job.prompt, job.num_tokens, call_id=call_id, **extra)
        self._progress = asyncio.Condition()
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> list[int]:
        try:
            async for event in self._events:
                for choice in event["choices"]:
                    self.token_ids += choice.get("token_ids") or []
                async with self._progress:
                    self._progress.notify_all()
        finally:
            async with self._progress:
                self._progress.notify_all()
        return self.token_ids

    async def until_tokens(self, count: int) -> None:
        async with asyncio.timeout(60), self._progress:
            await self._progress.wait_for(lambda: len(self.token_ids) >= count or self.task.done())
        assert len(self.token_ids) >= count, await self.task
