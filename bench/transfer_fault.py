"""A peer's process is killed in the middle of transfers: what the survivor has of it, and when.

Two processes with real pools, `Transfers` and links, on two GPUs, and the hub's channel between
them; no engine. Many transfers are under way when one process is sent SIGKILL. Then, for each kind
of link and for either end:

    failed_s     from the kill until each transfer has its answer from a surviving sender, and the
                 survivor holds nothing for any of them
    computes     whether the survivor's GPU still does
    left over    what it still holds for the dead one
    again_s      from the start of a new process until its links are open
    wrong        blocks of a transfer to the new life that did not arrive as they were sent

The survivor is told by the hub, which sees the process end, as in a cluster. `--device cpu`
rehearses with a tiny model, shared memory and a fake NCCL.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch

from bench._report import Scalar, parser, publish
from bench._transfer import TINY
from bench._workers import Cluster, Course, Member, build_once, cluster, prompt, sources
from bench.ops_blocks import BLOCK_SIZE, LLAMA_2_13B, Shape

LIMIT_S = 2.0
"""Within which the survivor has to have got over it."""
WAIT_S = 30.0
ENDS = ("receiver", "sender")


class Plan(msgspec.Struct, frozen=True):
    shape: Shape
    devices: tuple[str, str]
    kinds: tuple[str, ...]
    num_tokens: int
    num_transfers: int
    """Under way at once: some tens of milliseconds of work, for a kill takes a few to be felt."""
    pool_bytes: int


class Outcome(msgspec.Struct):
    """Of one kill."""

    link: str
    killed: str
    num_failed: int
    """Of the transfers: they had not ended when it happened."""
    failed_s: float
    computes: bool
    left_over: list[str]
    again_s: float
    wrong: int

    @property
    def is_good(self) -> bool:
        return (
            self.num_failed > 0
            and self.failed_s <= LIMIT_S
            and self.computes
            and not self.left_over
            and not self.wrong
        )

    def row(self) -> dict[str, Scalar]:
        return {
            "link": self.link,
            "killed": self.killed,
            "failed transfers": self.num_failed,
            "failed_s": round(self.failed_s, 4),
            "computes": self.computes,
            "left over": ", ".join(self.left_over) or None,
            "again_s": round(self.again_s, 2),
            "wrong": self.wrong,
            "good": self.is_good,
        }


class Turns:
    """Processes start side by side; when all have, kills come one at a time."""

    def __init__(self, count: int) -> None:
        self._num_starting = count
        self._all_started = asyncio.Event()
        self._lock = asyncio.Lock()

    def started(self) -> None:
        """One group of processes has, or never will."""
        self._num_starting -= 1
        if not self._num_starting:
            self._all_started.set()

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        await self._all_started.wait()
        async with self._lock:
            yield


async def kill_one(plan: Plan, kind: str, end: str, turns: Turns) -> Outcome:
    """One kill, with a cluster of its own."""
    with tempfile.TemporaryDirectory(prefix="fault-") as name:
        async with cluster(Path(name)) as group:
            try:
                starts = [start(plan, group, kind, instance, 1) for instance in ("P0", "D0")]
                sender, receiver = await asyncio.gather(*starts)
                await group.join(sender, receiver)
                await settle(group, sender, receiver, plan)
            finally:
                turns.started()
            async with turns.one():
                return await kill(plan, group, kind, end, sender, receiver)


async def kill(
    plan: Plan, group: Cluster, kind: str, end: str, sender: Member, receiver: Member
) -> Outcome:
    """Kill one of two that are joined, and start it again."""
    courses = [
        group.transfer(sender, receiver, prompt(plan.num_tokens, seed=number))
        for number in range(plan.num_transfers)
    ]
    await asyncio.wait_for(courses[0].done, WAIT_S)
    victim, survivor = (receiver, sender) if end == "receiver" else (sender, receiver)
    killed_at = time.perf_counter()
    victim.process.kill()
    await asyncio.wait_for(until_lost(victim), WAIT_S)
    if end == "receiver":
        failed = await failures_at_sender(courses, WAIT_S)
    else:
        failed = unfinished(courses)
        for course in failed:
            group.cancel(course)
    state = await emptied(survivor)
    failed_s = time.perf_counter() - killed_at
    begun = time.perf_counter()
    again = await start(plan, group, kind, victim.config.instance, 2)
    sender, receiver = (sender, again) if end == "receiver" else (again, receiver)
    await group.join(sender, receiver)
    again_s = time.perf_counter() - begun
    return Outcome(
        link=kind,
        killed=end,
        num_failed=len(failed),
        failed_s=failed_s,
        computes=state["computes"],
        left_over=state["holders"],
        again_s=again_s,
        wrong=await settle(group, sender, receiver, plan),
    )


async def start(plan: Plan, group: Cluster, kind: str, name: str, epoch: int) -> Member:
    return await group.start(
        name,
        epoch=epoch,
        device=plan.devices[0 if name == "P0" else 1],
        link=kind,
        shape=plan.shape.name,
        pool_bytes=plan.pool_bytes,
        num_source_blocks=plan.num_tokens // BLOCK_SIZE,
    )


async def settle(group: Cluster, sender: Member, receiver: Member, plan: Plan) -> int:
    """One transfer from end to end; returns how many blocks are not as they were sent."""
    tokens = prompt(plan.num_tokens, seed=-1 - sender.config.epoch - receiver.config.epoch)
    course = group.transfer(sender, receiver, tokens)
    if (error := await asyncio.wait_for(course.done, WAIT_S)) is not None:
        raise RuntimeError(error)
    ids = sources(await sender.ask("source ids"), plan.num_tokens)
    found = await receiver.ask("verify", token_ids=tokens, source_ids=ids, sender="P0")
    wrong: int = found["wrong"]
    return wrong


async def until_lost(member: Member) -> None:
    await member.process.wait()


async def failures_at_sender(courses: list[Course], patience_s: float) -> list[Course]:
    """Every transfer that the sender had heard of is answered; the others died with the receiver.

    Raises: RuntimeError if one is not.
    """
    deadline = time.perf_counter() + patience_s
    known = [course for course in courses if "Allocated" in course.at]
    while any("Sent" not in c.at and not c.done.done() for c in known):
        if time.perf_counter() > deadline:
            raise RuntimeError("a transfer to the dead process never ended")
        await asyncio.sleep(0.001)
    return [course for course in known if "Inserted" not in course.at]


def unfinished(courses: list[Course]) -> list[Course]:
    """Those whose sender is gone before it has said that they were sent."""
    return [course for course in courses if "Sent" not in course.at]


async def emptied(survivor: Member) -> dict[str, Any]:
    """How it is, once it has done what it was told."""
    deadline = time.perf_counter() + WAIT_S
    while True:
        state: dict[str, Any] = await survivor.ask("check")
        if not state["holders"] or time.perf_counter() > deadline:
            return state
        await asyncio.sleep(0.005)


async def kill_all(plan: Plan) -> tuple[list[Outcome], dict[str, str]]:
    """Each kind of link and each end; what went wrong where there is no outcome."""
    cases = [(kind, end) for kind in plan.kinds for end in ENDS]
    turns = Turns(len(cases))
    kills = [kill_one(plan, kind, end, turns) for kind, end in cases]
    ended = await asyncio.gather(*kills, return_exceptions=True)
    outcomes: list[Outcome] = []
    problems: dict[str, str] = {}
    for (kind, end), outcome in zip(cases, ended, strict=True):
        if isinstance(outcome, Outcome):
            outcomes.append(outcome)
            continue
        problems[f"{kind}, {end} killed"] = f"{type(outcome).__name__}: {outcome}"
        print(f"{kind}, {end} killed: {type(outcome).__name__}: {outcome}", file=sys.stderr)
    return outcomes, problems


def plan_for(device: str) -> Plan:
    if device == "cpu":
        return Plan(TINY, ("cpu", "cpu"), ("shm", "nccl"), 8192, 20, 128 << 20)
    num_gpus = torch.cuda.device_count()
    if num_gpus > 1:
        return Plan(LLAMA_2_13B, ("cuda:0", "cuda:1"), ("ipc", "nccl"), 2048, 12, 22 << 30)
    print("transfer_fault: one GPU, so without NCCL, which cannot join two ranks there")
    return Plan(LLAMA_2_13B, ("cuda:0", "cuda:0"), ("ipc",), 2048, 12, 22 << 30)


def main() -> None:
    options: argparse.ArgumentParser = parser(__doc__)
    options.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: rehearse")
    args = options.parse_args()
    if args.device == "cuda" and not torch.cuda.device_count():
        print("transfer_fault: no GPU on this machine, nothing to measure")
        return
    plan = plan_for(args.device)
    build_once(args.device)
    outcomes, problems = asyncio.run(kill_all(plan))
    publish(
        "transfer_fault",
        settings={
            "model": plan.shape.name,
            "num_tokens": plan.num_tokens,
            "num_transfers": plan.num_transfers,
            "devices": list(plan.devices),
            "limit_s": LIMIT_S,
            "problems": problems,
        },
        metrics={f"{o.link}/{o.killed} killed/failed_s": round(o.failed_s, 4) for o in outcomes},
        raw=msgspec.to_builtins(outcomes),
        out=args.out,
        rows=[outcome.row() for outcome in outcomes],
    )
    if problems or not all(outcome.is_good for outcome in outcomes):
        sys.exit("not as it must be")


if __name__ == "__main__":
    main()
