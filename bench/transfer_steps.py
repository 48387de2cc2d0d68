"""What a transfer takes between two instances: allocate → transmit → insert, through the hub.

Two processes with real pools, `Transfers` and links, on two GPUs, and the hub's channel
between them; no engine. Timed at the hub, from `Allocate` until `Inserted` has come back, for each
kind of link: a whole prompt that the receiver has nothing of (the paper's 2,048 tokens of
Llama-2-13B), and one of which it lacks the last 64 tokens. Beside it what the link itself took.

`--device cpu` rehearses with a tiny model, shared memory and a fake NCCL.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import msgspec
import torch
import uvloop

from bench._report import Scalar, parser, publish
from bench._transfer import TINY
from bench._workers import Cluster, Course, Member, build_once, cluster, prompt, sources
from bench.ops_blocks import BLOCK_SIZE, LLAMA_2_13B, Shape

WARM_UP = 3
STEPS = {"allocate": "Allocated", "transmit": "Sent", "insert": "Inserted"}


class Plan(msgspec.Struct, frozen=True):
    shape: Shape
    devices: tuple[str, str]
    kinds: tuple[str, ...]
    num_tokens: int
    num_missing: int
    pool_bytes: int


class Sample(msgspec.Struct):
    """One transfer, in seconds."""

    link: str
    case: str
    size_bytes: int
    steps_s: dict[str, float]
    total_s: float
    link_s: float


async def measure(plan: Plan, kind: str, repeats: int) -> list[Sample]:
    """One kind of link."""
    with tempfile.TemporaryDirectory(prefix="steps-") as name:
        async with cluster(Path(name)) as group:
            starts = [
                group.start(
                    instance,
                    device=device,
                    link=kind,
                    shape=plan.shape.name,
                    pool_bytes=plan.pool_bytes,
                    num_source_blocks=plan.num_tokens // BLOCK_SIZE,
                )
                for instance, device in zip(("P0", "D0"), plan.devices, strict=True)
            ]
            sender, receiver = await asyncio.gather(*starts)
            await group.join(sender, receiver)
            samples = []
            for repeat in range(WARM_UP + repeats):
                tokens = prompt(plan.num_tokens, seed=repeat)
                course = await run(group, sender, receiver, tokens)
                samples.append(sample_of(kind, f"{plan.num_tokens} tokens", course))
            await verify(sender, receiver, tokens)
            known = prompt(plan.num_tokens - plan.num_missing, seed=-1)
            await run(group, sender, receiver, known)
            for repeat in range(WARM_UP + repeats):
                tokens = known + prompt(plan.num_missing, seed=1000 + repeat)
                course = await run(group, sender, receiver, tokens)
                samples.append(sample_of(kind, f"the last {plan.num_missing}", course))
            await verify(sender, receiver, tokens)
            return samples[WARM_UP : WARM_UP + repeats] + samples[2 * WARM_UP + repeats :]


async def run(group: Cluster, sender: Member, receiver: Member, tokens: list[int]) -> Course:
    """One transfer. Raises: RuntimeError, TimeoutError."""
    course = group.transfer(sender, receiver, tokens)
    error = await asyncio.wait_for(course.done, 30.0)
    if error is not None:
        raise RuntimeError(error)
    return course


async def verify(sender: Member, receiver: Member, tokens: list[int]) -> None:
    """A transfer of the wrong bytes is worth nothing."""
    ids = sources(await sender.ask("source ids"), len(tokens))
    found = await receiver.ask("verify", token_ids=tokens, source_ids=ids, sender="P0")
    if found["wrong"]:
        raise RuntimeError(f"{found['wrong']} blocks did not arrive as they were sent")


def sample_of(kind: str, case: str, course: Course) -> Sample:
    times = [course.at["Allocate"], *(course.at[event] for event in STEPS.values())]
    spans = [after - before for before, after in pairwise(times)]
    return Sample(
        link=kind,
        case=case,
        size_bytes=course.size_bytes,
        steps_s=dict(zip(STEPS, spans, strict=True)),
        total_s=times[-1] - times[0],
        link_s=course.link_s,
    )


def rows_of(samples: list[Sample]) -> list[dict[str, Scalar]]:
    """Medians in milliseconds, and the slowest."""
    groups: dict[tuple[str, str], list[Sample]] = {}
    for sample in samples:
        groups.setdefault((sample.link, sample.case), []).append(sample)
    return [
        {
            "link": link,
            "case": case,
            "MB": round(group[0].size_bytes / 1e6, 1),
            **{
                f"{step}_ms": round(statistics.median(s.steps_s[step] for s in group) * 1e3, 3)
                for step in STEPS
            },
            "total_ms": round(statistics.median(s.total_s for s in group) * 1e3, 3),
            "slowest_ms": round(max(s.total_s for s in group) * 1e3, 3),
            "link_ms": round(statistics.median(s.link_s for s in group) * 1e3, 3),
        }
        for (link, case), group in groups.items()
    ]


def plan_for(device: str) -> Plan:
    if device == "cpu":
        return Plan(TINY, ("cpu", "cpu"), ("shm", "nccl"), 256, 64, 4 << 20)
    num_gpus = torch.cuda.device_count()
    if num_gpus > 1:
        return Plan(LLAMA_2_13B, ("cuda:0", "cuda:1"), ("ipc", "nccl"), 2048, 64, 9 << 30)
    print("transfer_steps: one GPU, so without NCCL, which cannot join two ranks there")
    return Plan(LLAMA_2_13B, ("cuda:0", "cuda:0"), ("ipc",), 2048, 64, 9 << 30)


def main() -> None:
    options: argparse.ArgumentParser = parser(__doc__)
    options.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: rehearse")
    options.add_argument("--repeats", type=int, default=15)
    args = options.parse_args()
    if args.device == "cuda" and not torch.cuda.device_count():
        print("transfer_steps: no GPU on this machine, nothing to measure")
        return
    build_once(args.device)
    plan = plan_for(args.device)
    samples: list[Sample] = []
    problems: dict[str, str] = {}
    for kind in plan.kinds:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as the hub's
                samples += runner.run(measure(plan, kind, args.repeats))
        except (RuntimeError, OSError) as error:  # TimeoutError is an OSError
            problems[kind] = f"{type(error).__name__}: {error}"
            print(f"{kind}: {problems[kind]}", file=sys.stderr)
    rows = rows_of(samples)
    publish(
        "transfer_steps",
        settings={
            "model": plan.shape.name,
            "block_size": BLOCK_SIZE,
            "repeats": args.repeats,
            "devices": list(plan.devices),
            "problems": problems,
        },
        metrics={f"{r['link']}/{r['case']}/total_ms": r["total_ms"] for r in rows},
        raw=msgspec.to_builtins(samples),
        out=args.out,
        rows=rows,
    )


if __name__ == "__main__":
    main()
