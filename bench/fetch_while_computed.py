"""Fetches of what the source is computing just then: are the tokens those of a run without a cache?

    python -m bench.fetch_while_computed [--device cuda --model FOLDER] [--out FILE]

Two colocated instances. PD0 gets a document in chunks of 512 tokens; some part of its time later
PD1 gets the same document and a question, and is told to fetch what PD0 holds (`_steered.py`).
Under asynchronous scheduling PD0's index names blocks whose KV the present step is still writing: a
link that read them too early would give PD1 garbage (ADR 0033). Then PD1 computes all of it by
itself, under a cache salt of its own; greedy replies have to be the same, in float32. On one GPU
both instances share it.
"""

from __future__ import annotations

import os
import random
import threading
import time
from typing import Any

from bench._fetch_replay import SOURCE, TARGET
from bench._report import parser, publish
from bench._serve import get, released, serving
from bench._steered import REQUEST_TIMEOUT_S, complete
from memserve.core.policy import Fetching
from memserve.types import InstanceId

FIRST_TOKEN, LAST_TOKEN = 1000, 9000
QUESTION_TOKENS, REPLY_TOKENS = 37, 24


class Server:
    """The server under test."""

    def __init__(self, url: str, rng: random.Random) -> None:
        self.url = url
        self._model = get(f"{url}/v1/models")["data"][0]["id"]
        self._rng = rng

    def tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(count)]

    def ask(
        self, prompt: list[int], instance: InstanceId, way: Fetching, count: int, **fields: Any
    ) -> dict[str, Any]:
        """See `complete`."""
        return complete(self.url, prompt, instance, way, count, model=self._model, **fields)


def fetch_once(server: Server, length: int, delay_s: float, number: int) -> dict[str, Any]:
    """One document: whether it was fetched, while it was computed, and gave the same reply."""
    document, question = server.tokens(length), server.tokens(QUESTION_TOKENS)
    computing = threading.Thread(target=server.ask, args=(document, SOURCE, Fetching.NEVER, 1))
    computing.start()
    time.sleep(delay_s)
    was_computing = computing.is_alive()
    prompt = document + question
    answer = server.ask(prompt, TARGET, Fetching.ALWAYS, REPLY_TOKENS)
    computing.join(REQUEST_TIMEOUT_S)
    steps = released(server.url, answer["id"])
    reference = server.ask(
        prompt, TARGET, Fetching.NEVER, REPLY_TOKENS, cache_salt=f"alone {number}"
    )
    return {
        "was_fetched": "fetched" in steps,
        "was_computing": was_computing,
        "is_equal": answer["choices"][0]["text"] == reference["choices"][0]["text"],
        "delay_s": delay_s,
    }


def main() -> None:
    args = _arguments()
    settings: dict[str, object] = {
        "cluster.device": args.device,
        "cluster.start_timeout_s": 280,
        "engine.dtype": "float32",
        "engine.max_num_batched_tokens": 512,
        "engine.max_model_len": 4096,
        "mempool.hbm_mb": 1024,
    }
    if args.device == "cuda":
        settings |= {"cluster.gpus": 1, "engine.gpu_memory_utilization": 0.05}
        settings["engine.attention_backend"] = "TRITON_ATTN"  # FlashAttention has no float32
        os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
    if args.model:
        settings["models.model"] = args.model
    rng = random.Random(args.seed)
    with serving(["--mode", "2PD-CC"], settings, program="bench._steered") as url:
        server = Server(url, rng)
        for instance in (SOURCE, TARGET) * 2:
            began = time.monotonic()
            server.ask(server.tokens(args.length), instance, Fetching.NEVER, 1)
        document_s = time.monotonic() - began
        found = [
            fetch_once(server, args.length, rng.uniform(0.1, 0.95) * document_s, number)
            for number in range(args.count)
        ]
        audit = get(f"{url}/v1/status?audit=true")["audit"]
    problems = [problem for one in audit for problem in one["problems"]]
    fetched = [one for one in found if one["was_fetched"]]
    publish(
        "fetch_while_computed",
        settings={"device": args.device, "length": args.length, "count": args.count},
        metrics={
            "document_s": document_s,
            "replies": len(found),
            "equal": sum(one["is_equal"] for one in found),
            "fetched": len(fetched),
            "fetched_while_computed": sum(one["was_computing"] for one in fetched),
            "problems": len(problems),
        },
        raw=found,
        out=args.out,
    )
    if problems or not all(one["is_equal"] for one in found):
        raise SystemExit(f"replies differ, or the audit found something: {problems}")


def _arguments() -> Any:
    made = parser(__doc__)
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    made.add_argument("--model", default="", help="a folder or a name; default: the bundled one")
    made.add_argument("--length", type=int, default=1400, help="tokens of a document")
    made.add_argument("--count", type=int, default=6, help="documents")
    made.add_argument("--seed", type=int, default=3)
    return made.parse_args()


if __name__ == "__main__":
    main()
