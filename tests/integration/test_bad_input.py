"""A user's mistake gets one clear error that names the thing and what is allowed; no traceback."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.api_client import ApiError, Client
from tests.integration.cluster_harness import MODEL, Cluster, command_line, free_port, running

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

MAX_MODEL_LEN = 512


# ── the command line ──────────────────────────────────────────────────────────────────────────


def _up(*words: str, mode: str = "1P1D-CC", deadline_s: float = 60.0) -> tuple[int, str]:
    """`memserve up` that is expected to end by itself: exit code and standard error."""
    done = subprocess.run(
        [*command_line(mode, free_port()), *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=deadline_s,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--mode", "3X"], ["cluster.mode", "3X", "<n>P<m>D"]),
        (["--mode", "0P1D"], ["cluster.mode", "0P1D"]),
        (["--caching", "some"], ["cluster.caching", "some", "none, prefill, decode, full"]),
        (["--model", "no-such-model"], ["models.model", "no-such-model", MODEL]),
        (["--model", "/no/such/folder"], ["models.model", "/no/such/folder"]),
        (["--device", "tpu"], ["cluster.device", "tpu", "cpu"]),
        (["--device", "cuda"], ["cluster.device", "cuda", "cpu"]),
        (["--gpus", "2"], ["cluster.gpus", "2"]),
        (["--port", "99999"], ["server.port", "99999", "65535"]),
        (["--set", "mempool.hbm=48"], ["mempool.hbm", "mempool.hbm_mb"]),
        (["--set", "engine.dtyp=half"], ["engine.dtyp", "dtype"]),
        (["--set", "scheduler.max_attempts=0"], ["scheduler.max_attempts", "0", "above 0"]),
        (["--set", "nonsense"], ["nonsense"]),
        (["--config", "/no/such/file.toml"], ["/no/such/file.toml"]),
        (["--colour"], ["--colour"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistakes_in_the_configuration(words: list[str], named: list[str]) -> None:
    code, errors = _up(*words)
    assert code == 2
    lines = errors.strip().splitlines()
    assert len(lines) == 1, errors
    assert lines[0].startswith("memserve: error: ")
    for word in named:
        assert word in lines[0]


def test_a_model_with_several_kv_groups(tmp_path: Path, model_folder: Path) -> None:
    """Layers with a sliding window keep other blocks than those with full attention."""
    folder = _mixed_attention_model(tmp_path / "mixed", model_folder)
    code, errors = _up(
        *["--model", str(folder), "--set", "engine.load_format=dummy"],
        *["--set", "engine.max_model_len=512"],
        deadline_s=120,
    )
    assert code == 1
    lines = [line for line in errors.splitlines() if line.startswith("memserve: error: ")]
    assert len(lines) == 1, errors
    assert "KV cache groups" in lines[0]
    assert "Traceback" not in errors


def _mixed_attention_model(folder: Path, tokenizer_from: Path) -> Path:
    """A tiny Gemma 3: five layers with a sliding window for each with full attention."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_from / name, folder)
    vocabulary = json.loads((tokenizer_from / "config.json").read_text())["vocab_size"]
    layers = ["sliding_attention"] * 5 + ["full_attention"]
    config = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": vocabulary,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": len(layers),
        "layer_types": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window": 128,
        "max_position_embeddings": 1024,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# ── HTTP ──────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    settings = {"engine.max_model_len": MAX_MODEL_LEN, "mempool.hbm_mb": 48}
    with running("1P1D-CC", settings=settings) as cluster:
        yield cluster


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[Client]:
    """Afterwards the server is as it was."""
    async with Client(cluster) as client:
        yield client
        await client.until_idle()
    assert "Traceback" not in cluster.output()


def _format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}


_HELLO = [{"role": "user", "content": "Hello!"}]


@pytest.mark.parametrize(
    ("path", "body", "status", "named"),
    [
        ("chat/completions", {"messages": []}, 400, ["messages"]),
        ("chat/completions", {}, 400, ["messages"]),
        ("chat/completions", {"messages": "hello"}, 400, ["messages"]),
        ("chat/completions", {"messages": [{"content": "no role"}]}, 400, ["role"]),
        ("chat/completions", {"messages": _HELLO, "model": "gpt-9"}, 404, ["gpt-9", MODEL]),
        ("chat/completions", {"messages": _HELLO, "temperature": "hot"}, 400, ["temperature"]),
        ("chat/completions", {"messages": _HELLO, "max_tokens": -1}, 400, ["max_tokens"]),
        ("chat/completions", {"messages": _HELLO, "n": 0}, 400, ["n"]),
        ("chat/completions", {"messages": _HELLO, "top_p": 7}, 400, ["top_p"]),
        (
            "chat/completions",
            {"messages": _HELLO, "response_format": {"type": "xml"}},
            400,
            ["response_format"],
        ),
        # It compiles, and allows no token.
        (
            "chat/completions",
            {"messages": _HELLO, "response_format": _format({"$ref": "#"})},
            400,
            ["response_format"],
        ),
        (
            "chat/completions",
            {"messages": _HELLO, "response_format": _format({"$ref": "#/nowhere"})},
            400,
            ["response_format", "nowhere"],
        ),
        ("completions", {"prompt": "Hello", "n": 16384}, 400, ["n", "128"]),
        ("completions", {"prompt": ""}, 400, ["prompt"]),
        ("completions", {"prompt": []}, 400, ["prompt"]),
        ("completions", {}, 400, ["prompt"]),
        ("completions", {"prompt": "Hello", "max_tokens": "ten"}, 400, ["max_tokens"]),
        ("completions", {"prompt": "Hello", "model": "gpt-9"}, 404, ["gpt-9", MODEL]),
        ("completions", {"prompt": [5] * (MAX_MODEL_LEN + 1)}, 400, ["512", "513"]),
        ("completions", {"prompt": [5] * MAX_MODEL_LEN}, 400, ["512"]),
        ("completions", {"prompt": "so " * 2000}, 400, ["512"]),
        ("completions", {"prompt": [10_000_000]}, 400, ["10000000"]),
        ("nonsense", {}, 404, ["/v1/nonsense"]),
    ],
    ids=lambda value: json.dumps(value)[:50] if isinstance(value, dict) else None,
)
async def test_bad_requests(
    client: Client, path: str, body: dict[str, Any], status: int, named: list[str]
) -> None:
    for stream in (False, True):
        with pytest.raises(ApiError) as caught:
            await client.post(f"/v1/{path}", {"model": MODEL, "stream": stream} | body)
        error = caught.value
        assert error.status == status
        assert error.error.keys() >= {"message", "type", "param", "code"}
        for word in named:
            assert word in error.message or word == error.error["param"], error.message
        assert "\n" not in error.message.strip()
        assert len(error.message) < 400


@pytest.mark.parametrize("data", [b"", b"{", b'{"model": ', b"\xff\xfe", b"[]", b'"text"'])
async def test_malformed_json(client: Client, data: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize"):
        async with client.session.post(path, data=data, headers=headers) as response:
            error = (await response.json())["error"]
            assert response.status == 400
            assert "JSON" in error["message"] or "object" in error["message"]


async def test_methods_and_unknown_requests(client: Client) -> None:
    async with client.session.get("/v1/chat/completions") as response:
        assert response.status == 405
        assert "POST" in (await response.json())["error"]["message"]
    async with client.session.get("/v1/requests/never-seen") as response:
        assert response.status == 404
        assert "never-seen" in (await response.json())["error"]["message"]
    async with client.session.get("/v1/status?audit=perhaps") as response:
        assert response.status == 400
        assert "true or false" in (await response.json())["error"]["message"]


async def test_the_longest_possible_prompt(client: Client) -> None:
    """One token less than the context is allowed, and gives one token."""
    answer = await client.complete([5] * (MAX_MODEL_LEN - 1), 1)
    assert len(answer.token_ids) == 1
    assert answer.finish_reason == "length"
