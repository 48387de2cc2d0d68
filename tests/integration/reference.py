"""What the clusters are compared with: the greedy tokens of one plain vLLM instance.

`Reference` is the tests' side; run as a program, this module is the instance: a process of its own
with vLLM's defaults (no MemServe, no prefix caching), in float32. It reads one JSON request per
line on its standard input and answers with one JSON line on the file descriptor it is given.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

_ROOT = Path(__file__).resolve().parents[2]
_START_S = 120.0
MAX_MODEL_LEN = 2048
KV_BYTES = 512 << 20


class Job(NamedTuple):
    """A prompt, and how many tokens to generate."""

    prompt: list[int]
    num_tokens: int


class Reference:
    """The plain instance, in a child process that is started by the first question."""

    def __init__(self, model: Path, log: Path) -> None:
        self._model = model
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._answers = -1
        self._known: dict[tuple[int, ...], list[int]] = {}

    def tokens(self, jobs: Sequence[Job], deadline_s: float = 300.0) -> list[list[int]]:
        """The generated tokens of each job, in order. Raises: TimeoutError, EOFError."""
        missing = {
            tuple(job.prompt): job.num_tokens
            for job in sorted(jobs, key=lambda job: job.num_tokens)
            if len(self._known.get(tuple(job.prompt), [])) < job.num_tokens
        }
        if missing:
            asked = [Job(list(prompt), count) for prompt, count in missing.items()]
            answers = self._ask(asked, deadline_s)
            self._known.update(zip(missing, answers, strict=True))
        return [self._known[tuple(job.prompt)][: job.num_tokens] for job in jobs]

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            assert process.stdin is not None
            process.stdin.close()
            os.close(self._answers)

    def _ask(self, jobs: list[Job], deadline_s: float) -> list[list[int]]:
        process = self._process or self._start()
        assert process.stdin is not None
        process.stdin.write(json.dumps(jobs).encode() + b"\n")
        process.stdin.flush()
        answer: list[list[int]] = json.loads(self._read_line(deadline_s + _START_S))
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        self._answers, theirs = os.pipe()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.integration.reference", str(self._model)]
                + [str(theirs)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[theirs],
                cwd=_ROOT,
            )
        os.close(theirs)
        return self._process

    def _read_line(self, deadline_s: float) -> bytes:
        line = b""
        deadline = time.monotonic() + deadline_s
        while not line.endswith(b"\n"):
            ready, _, _ = select.select(
                [self._answers], [], [], max(0, deadline - time.monotonic())
            )
            if not ready:
                raise TimeoutError(f"the plain instance gave no answer within {deadline_s:g} s")
            piece = os.read(self._answers, 1 << 16)
            if not piece:
                raise EOFError(f"the plain instance ended:\n{self._log.read_text()[-4000:]}")
            line += piece
        return line


def serve(model: str, answers_fd: int) -> None:
    """Answer questions until the standard input ends."""
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    }
    from vllm import LLM, SamplingParams

    options: dict[str, Any] = {"enforce_eager": True, "enable_prefix_caching": False}
    engine = LLM(
        model,
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        kv_cache_memory_bytes=KV_BYTES,
        **options,
    )
    with os.fdopen(answers_fd, "w") as answers:
        for line in sys.stdin:
            jobs = [Job(*job) for job in json.loads(line)]
            params = [
                SamplingParams(temperature=0, max_tokens=job.num_tokens, ignore_eos=True)
                for job in jobs
            ]
            prompts = [{"prompt_token_ids": job.prompt} for job in jobs]
            outputs = engine.generate(prompts, params, use_tqdm=False)
            tokens = [list(output.outputs[0].token_ids) for output in outputs]
            answers.write(json.dumps(tokens) + "\n")
            answers.flush()


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
