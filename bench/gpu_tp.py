"""Two GPUs: instances of unequal tensor parallelism exchange KV, and give one instance's tokens.

    python -m bench.gpu_tp --model FOLDER [--pairs P=2,D=1 P=1,D=2 2] [--out FILE]

The model has to divide among two ranks, and its weights have to mean something, so that tokens
depend on the KV: SmolLM2 is given a fourth KV head, with its three query heads, whose weights are
zero. That changes no output, and the model can be split in two and four.

    reference   1PD of one rank, nothing cached: sessions of several turns, greedy, in float32
    each pair   1P1D-CC with these degrees, sharing the GPUs: the same tokens, with its cache in
                use, one session after the other and then all at once; pools audited; then a rank
                of the instance that has several is killed: it comes back, and serves

A fault prints the logs of all processes, and the exit code is 1. Pairs that no longer fit the time
are skipped, and said. `--device cpu` tries the script itself. Graphs are off unless `--graphs` is
given: that starts twice as slowly.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import psutil

from bench._cluster import Cluster, require
from bench._report import parser, publish
from bench.gpu_smoke import Run, Turn, reference, replay
from memserve.engine_args import count_gpus

PAIRS = ("P=2,D=1", "P=1,D=2", "2")
NUM_GROUPS = 4
"""KV heads of the padded model."""
NEEDED_S = 45.0
BACK_S = 120.0


def pad_heads(source: Path, target: Path, num_groups: int) -> None:
    """Write the model with KV heads, and their query heads, of zeros added to it."""
    import torch
    from safetensors.torch import load_file, save_file

    config = json.loads((source / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    rows = {
        "q_proj": heads // kv_heads * num_groups * width,
        "k_proj": num_groups * width,
        "v_proj": num_groups * width,
    }
    weights: dict[str, Any] = {}
    for file in sorted(source.glob("*.safetensors")):
        weights |= load_file(str(file))
    for name, weight in weights.items():
        part = name.split(".")[-2] if "." in name else name
        if part in rows:
            padded = torch.zeros(rows[part], weight.shape[1], dtype=weight.dtype)
            padded[: weight.shape[0]] = weight
            weights[name] = padded
        elif part == "o_proj":
            padded = torch.zeros(weight.shape[0], rows["q_proj"], dtype=weight.dtype)
            padded[:, : weight.shape[1]] = weight
            weights[name] = padded
    target.mkdir(parents=True)
    for file in source.iterdir():
        if file.suffix not in (".safetensors",) and not file.name.endswith(".index.json"):
            shutil.copy(file, target)
    config |= {
        "num_attention_heads": heads // kv_heads * num_groups,
        "num_key_value_heads": num_groups,
        "head_dim": width,
    }
    (target / "config.json").write_text(json.dumps(config, indent=1))
    save_file(weights, str(target / "model.safetensors"), metadata={"format": "pt"})


class TpRun(Run):
    """The pairs, one after the other."""

    def settings_for(self, pair: str) -> dict[str, object]:
        more: dict[str, object] = {"mempool.hbm_mb": 2048, "engine.gpu_memory_utilization": 0.2}
        if self.arguments.device == "cpu":
            more = {}
        elif pair:
            more["cluster.gpus"] = 2
        made = self.settings("float32") | more
        return made | ({"cluster.tp": pair} if pair else {})

    def make_reference(self) -> list[list[Turn]]:
        with self.clusters(("1PD", self.settings_for(""))) as (one,):
            sessions = reference(one, self.size)
            self.note("1PD_again", replay(one, sessions, 1), least_equal=1.0)
            answers = [tuple(turn.expected) for turns in sessions for turn in turns]
            require(len(set(answers)) == len(answers), "prompts that differ are answered alike")
            one.audit()
        return sessions

    def try_pair(self, pair: str, sessions: list[list[Turn]]) -> None:
        with self.clusters(("1P1D-CC", self.settings_for(pair))) as (split,):
            result = replay(split, sessions, 1)
            self.note(pair, result, least_equal=1.0)
            if not result.cached_tokens:
                self.faults.append(f"{pair}: nothing was found in a cache")
            self.check_links(split)
            split.audit()
            fresh = [[Turn([7, *t.prompt], t.expected) for t in turns[:1]] for turns in sessions]
            at_once = replay(split, fresh + sessions, 2 * self.size.sessions)
            known = [d for d in at_once.differences if int(d.split()[1]) >= self.size.sessions]
            self.raw[f"{pair}_at_once"] = known
            if len(known) > 1:  # a batch of another size may round otherwise once in a while
                self.faults.append(f"{pair} at once: {known}")
            split.audit()
            self.kill_rank(pair, split, sessions)

    def kill_rank(self, pair: str, cluster: Cluster, sessions: list[list[Turn]]) -> None:
        name = "P0" if pair.startswith("P=2") else "D0"
        before = cluster.instance(name)
        ranks = [pid for pid in children(before["pid"]) if not is_tracker(pid)]
        require(len(ranks) == 2, f"{name} has {len(ranks)} ranks, not 2")
        os.kill(ranks[1], signal.SIGKILL)
        back_s = cluster.wait_back(name, before["epoch"], BACK_S)
        self.metrics[f"{pair}_back_after_kill_s"] = back_s
        left = [pid for pid in [before["pid"], *ranks] if is_alive(pid)]
        if left:
            self.faults.append(f"{pair}: processes {left} have outlived the kill of a rank")
        self.note(f"{pair}_after_kill", replay(cluster, sessions[:1], 1), least_equal=1.0)
        cluster.audit()


def children(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children()]


def is_tracker(pid: int) -> bool:
    """Of Python's shared memory: a helper that every process with several others has."""
    return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()


def is_alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--model", type=Path, required=True, help="the folder of SmolLM2")
    options.add_argument("--pairs", nargs="+", default=list(PAIRS))
    options.add_argument("--max-seconds", type=float, default=480.0)
    options.add_argument("--graphs", action="store_true", help="compile, and capture graphs")
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = options.parse_args()
    if arguments.device == "cuda" and count_gpus() < 2:
        print("fewer than two NVIDIA GPUs are visible here: nothing is run")
        return 0
    arguments.eager = not arguments.graphs
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("gpu_tp was told to end"))
    with tempfile.TemporaryDirectory(prefix="memserve-tp-") as folder:
        source, arguments.model = arguments.model, str(Path(folder) / "padded")
        pad_heads(source, Path(arguments.model), NUM_GROUPS)
        run = TpRun(arguments)
        try:
            sessions = run.make_reference()
            for pair in arguments.pairs:
                if run.left_s < NEEDED_S:
                    print(f"skipped {pair}: {run.left_s:.0f} s are left", flush=True)
                    run.metrics[f"{pair}_pair"] = "skipped"
                    continue
                print(f"════ {pair}", flush=True)
                try_one(run, pair, sessions)
        except Exception as error:  # noqa: BLE001 -- what was measured so far is still written
            traceback.print_exc()
            run.faults.append(f"reference: {type(error).__name__}: {error}")
    run.raw["faults"] = run.faults
    settings = {"model": source.name, "pairs": " ".join(arguments.pairs), "eager": arguments.eager}
    publish("gpu_tp", settings=settings, metrics=run.metrics, raw=run.raw, out=arguments.out)
    for fault in run.faults:
        print(f"FAULT {fault}", flush=True)
    return 1 if run.faults else 0


def try_one(run: TpRun, pair: str, sessions: list[list[Turn]]) -> None:
    started = time.monotonic()
    try:
        run.try_pair(pair, sessions)
    except Exception as error:  # noqa: BLE001 -- the next pair may tell more
        traceback.print_exc()
        run.faults.append(f"{pair}: {type(error).__name__}: {error}")
    run.metrics[f"{pair}_s"] = round(time.monotonic() - started, 1)


if __name__ == "__main__":
    sys.exit(main())
