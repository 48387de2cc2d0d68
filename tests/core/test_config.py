"""Layers, origins and checks of the configuration."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from memserve import config, config_layers, engine_args
from memserve.config import Config, load
from memserve.config_text import to_toml, toml_value
from memserve.errors import ConfigError
from memserve.types import Caching

ROOT = Path(__file__).resolve().parents[2]


def _set(*assignments: str) -> Config:
    return load(assignments=assignments).config


def _refusal(*assignments: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(assignments=assignments)
    return caught.value


def _file(folder: Path, text: str) -> Path:
    path = folder / "memserve.toml"
    path.write_text(text)
    return path


# ── layers ────────────────────────────────────────────────────────────────────────────────────


def test_defaults() -> None:
    settings = load()
    assert str(config.mode_in_force(settings.config)) == "1P1D-CC"
    assert settings.config.cluster.caching is Caching.FULL
    assert settings.config.cluster.device == "cpu"
    assert settings.config.kv_bytes == 128 << 20
    assert settings.config.served_name == "smollm2-135m-instruct"
    assert settings.config.engine == engine_args.engine_defaults("cpu")
    assert settings.origins["server.port"] == "default"
    assert set(settings.origins) >= set(config.keys())


def test_later_layers_win_and_are_remembered(tmp_path: Path) -> None:
    path = _file(tmp_path, "[server]\nport = 1\nhost = 'a'\nlog_level = 'debug'\napi_key = 'k'\n")
    settings = load(
        config_file=path,
        environ={"MEMSERVE_SERVER_PORT": "2", "MEMSERVE_SERVER_HOST": "b", "MEMSERVE_OTHER": "x"}
        | {"MEMSERVE_SERVER_LOG_LEVEL": "error"},
        flags={"server.port": ("--port", "3"), "server.host": ("--host", "c")},
        assignments=["server.port=4"],
    )
    server = settings.config.server
    assert (server.port, server.host, server.log_level, server.api_key) == (4, "c", "error", "k")
    assert settings.origins["server.port"] == "--set"
    assert settings.origins["server.host"] == "--host"
    assert settings.origins["server.log_level"] == "MEMSERVE_SERVER_LOG_LEVEL"
    assert settings.origins["server.api_key"].endswith("memserve.toml")
    assert settings.origins["server.request_timeout_s"] == "default"


def test_which_file_is_read(tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    named, by_variable = tmp_path / "named.toml", tmp_path / "variable.toml"
    for number, path in enumerate((named, by_variable, here / "memserve.toml"), start=1):
        path.write_text(f"server.port = {number}\n")
    environ = {"MEMSERVE_CONFIG": str(by_variable)}

    def port(**places: Any) -> int:
        return load(**places).config.server.port

    assert port(config_file=named, environ=environ, folder=here) == 1
    assert port(environ=environ, folder=here) == 2
    assert port(environ={"MEMSERVE_CONFIG": ""}, folder=here) == 3
    assert port(folder=tmp_path) == 8000


@pytest.mark.parametrize(
    ("assignment", "key", "value"),
    [
        ("cluster.mode=1P2D+1PD-CC", "mode", "1P2D+1PD-CC"),
        ("cluster.mode='2PD'", "mode", "2PD"),
        ("cluster.caching=prefill", "caching", Caching.PREFILL),
        ("cluster.start_timeout_s=30", "start_timeout_s", 30.0),
        ("cluster.max_restarts = 0", "max_restarts", 0),
    ],
)
def test_assignments(assignment: str, key: str, value: object) -> None:
    assert getattr(_set(assignment).cluster, key) == value


@pytest.mark.parametrize("text", ["7", "true", "1.50", "2024-01-01", "a#b", "12 # x", "a=b", "[x"])
def test_keys_that_take_text_take_any_word(text: str) -> None:
    assert _set(f"models.served_name={text}").models.served_name == text
    assert _set(f'models.served_name="{text}"').models.served_name == text


def test_loras_are_a_table_in_a_file_and_in_an_assignment(tmp_path: Path) -> None:
    loras = {"sql": "/adapters/sql", "my chat": "~/chat"}
    path = _file(tmp_path, "[models.loras]\nsql = '/adapters/sql'\n'my chat' = '~/chat'\n")
    from_file = load(config_file=path)
    assert from_file.config.models.loras == loras
    assert _set("models.loras={sql = '/adapters/sql', 'my chat' = '~/chat'}").models.loras == loras
    again = load(config_file=_file(tmp_path, to_toml(from_file)))
    assert again.config.models.loras == loras
    for wrong in ("models.loras=7", "models.loras={sql = 7}"):
        assert 'allowed: a table of names and folders: { name = "folder" }' in str(_refusal(wrong))
    assert "models.loras" in str(_refusal("engine.enable_lora=true"))


def test_an_assignment_sets_one_key_only() -> None:
    assert config_layers.parse_value("1\nother = 2") == "1\nother = 2"


# ── values that depend on others ──────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("assignments", "caching"),
    [
        (["cluster.mode=1P1D"], Caching.NONE),
        (["cluster.mode=1P1D-CC"], Caching.FULL),
        (["cluster.mode=1P1D", "cluster.caching=decode"], Caching.DECODE),
        (["cluster.mode=1P1D-CC", "cluster.caching=none"], Caching.NONE),
    ],
)
def test_caching(assignments: list[str], caching: Caching) -> None:
    loaded = _set(*assignments)
    assert loaded.cluster.caching is caching
    assert config.caching_in_force(loaded) is caching


def test_origins_of_what_depends_on_others() -> None:
    settings = load(flags={"cluster.mode": ("--mode", "2PD")}, assignments=["engine.seed=3"])
    assert settings.origins["cluster.caching"] == "by cluster.mode, --mode"
    assert settings.origins["engine.dtype"] == "default for device cpu"
    assert settings.origins["engine.seed"] == "--set"


def test_a_bare_config_has_the_same_answers() -> None:
    assert config.engine_settings(Config()) == load().config.engine
    assert config.caching_in_force(Config()) is Caching.FULL
    assert Config().kv_bytes == load().config.kv_bytes
    assert Config().served_name == load().config.served_name


# ── refusals ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("server.prot=1", "server.prot: unknown key, did you mean 'server.port'"),
        ("port=1", "port: unknown key, did you mean 'server.port'"),
        ("server.zzz=1", "server.zzz: unknown key; allowed: server.host, server.port"),
        ("zzz.qqq=1", "zzz.qqq: unknown key; allowed: section.key"),
        ("engine=1", "engine: unknown key"),
        ("server.port", "--set: 'server.port' is not an assignment; allowed: section.key=value"),
        ("=3", "--set: '=3' is not an assignment"),
        ("server.port=65536", "server.port: 65536 .*allowed: an integer from 1 to 65535"),
        ("server.port=-1", "server.port: -1"),
        ("server.port=true", "server.port: True"),
        ("server.port=http", "server.port: 'http' .--set.*allowed: an integer"),
        ("server.port=80.5", "server.port: 80.5"),
        ("server.host=", "server.host: '' .*allowed: a string, not empty"),
        ("server.log_level=loud", "allowed: debug, info, warning, error"),
        ("server.request_timeout_s=0", "allowed: seconds, above 0"),
        ("server.request_timeout_s=nan", "server.request_timeout_s: nan"),
        ("server.request_timeout_s=inf", "server.request_timeout_s: inf"),
        ("server.shutdown_grace_s=-1", "allowed: seconds, from 0"),
        ("cluster.mode=1P", "cluster.mode: '1P' is not a mode, did you mean '1P1D'"),
        ("cluster.caching=most", "allowed: none, prefill, decode, full"),
        ("cluster.device=tpu", "allowed: auto, cpu, cuda"),
        ("cluster.gpus=0", "cluster.gpus: 0 .*allowed: an integer above 0"),
        ("cluster.heartbeat_timeout_s=1", "heartbeat_timeout_s: 1.0 is not above"),
        ("mempool.hbm_mb=0", "mempool.hbm_mb: 0"),
        ("mempool.layout=diagonal", "allowed: auto, block_first, layer_first"),
        ("transfer.reservation_s=0", "transfer.reservation_s: 0"),
        ("scheduler.max_attempts=0", "scheduler.max_attempts: 0"),
        ("engine.max_modl_len=1", "unknown engine argument, did you mean 'engine.max_model_len'"),
        ("engine.qqq=1", "engine.qqq: unknown engine argument; allowed: the fields of vLLM"),
        ("engine.max_model_len=long", "'long' has the wrong type; allowed: int"),
        ("engine.enforce_eager=1", "1 has the wrong type; allowed: bool"),
        ("engine.seed=true", "True has the wrong type; allowed: int"),
        ("engine.block_size=16", "16 tokens do not fit.*allowed: a multiple of 32"),
        ("engine.block_size=0", "engine.block_size: 0"),
        ("engine.model=gpt", "MemServe sets this engine argument itself, see models.model"),
        ("engine.tensor_parallel_size=2", "see cluster.tp"),
        ("engine.data_parallel_size=2", "see cluster.mode"),
        ("engine.kv_cache_memory_bytes=1", "see mempool.hbm_mb"),
    ],
)
def test_refused(assignment: str, words: str) -> None:
    assert re.search(words, str(_refusal(assignment)))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[servr]\nport = 1\n", r"servr: unknown section, did you mean \[server\]"),
        ("[qqq]\n", "qqq: unknown section; allowed: server, cluster"),
        ("server = 3\n", "server: 3 is not a section"),
        ("[server]\nprt = 3\n", "did you mean 'server.port'"),
        ("[server\n", "not valid TOML"),
        ("[server]\nport = '8000'\n", r"server.port: '8000' \(.*memserve.toml\) is not allowed"),
    ],
)
def test_refused_files(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(config_file=_file(tmp_path, text))


def test_refused_paths(tmp_path: Path) -> None:
    absent = tmp_path / "absent.toml"
    with pytest.raises(ConfigError, match="--config: no file"):
        load(config_file=absent)
    with pytest.raises(ConfigError, match="MEMSERVE_CONFIG: no file"):
        load(environ={"MEMSERVE_CONFIG": str(absent)})
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load(config_file=binary)


def test_unknown_environment_key() -> None:
    with pytest.raises(ConfigError, match=r"server.prot: unknown key"):
        load(environ={"MEMSERVE_SERVER_PROT": "1"})


# ── engine arguments ──────────────────────────────────────────────────────────────────────────


def test_engine_arguments_pass_through() -> None:
    engine = _set(
        "engine.dtype=float32",
        "engine.gpu_memory_utilization=1",
        "engine.revision=123",
        "engine.hf_overrides={a = {b = 1}}",
    ).engine
    expected = {"dtype": "float32", "gpu_memory_utilization": 1, "revision": "123"}
    assert engine == engine_args.engine_defaults("cpu") | expected | {
        "hf_overrides": {"a": {"b": 1}}
    }


def test_engine_fields_are_read_without_importing_vllm() -> None:
    fields = engine_args.engine_fields()
    assert fields is not None
    assert fields["max_model_len"] == "int"
    assert not any(name.startswith("_") for name in fields)
    assert set(engine_args.OWNED) <= set(fields)
    assert set(engine_args.engine_defaults("cpu")) <= set(fields)
    assert set(engine_args.engine_defaults("cuda")) <= set(fields)


def test_without_vllm_names_are_not_checked(tmp_path: Path) -> None:
    assert engine_args.engine_fields(tmp_path) is None
    (tmp_path / "engine").mkdir()
    source = tmp_path / "engine" / "arg_utils.py"
    for text in ("class Other:\n    a: int\n", "class EngineArgs:\n    pass\n", "class ("):
        source.write_text(text)
        assert engine_args.engine_fields(tmp_path) is None
    source.write_text("class EngineArgs:\n    a: int | None = 3\n    _b: int\n    c = 1\n")
    assert engine_args.engine_fields(tmp_path) == {"a": "int | None"}
    assert engine_args.engine_argument("anything", 3, None, None) == 3
    with pytest.raises(ConfigError, match=r"see models\.model"):
        engine_args.engine_argument("model", "x", None, None)


# ── the text of a configuration ───────────────────────────────────────────────────────────────


def test_printed_configuration_reads_back(tmp_path: Path) -> None:
    settings = load(
        assignments=[
            "cluster.mode=1P2D",
            'models.served_name=a "b" \\ c # é 😀',
            "engine.hf_overrides={x = [1, 2.5, 'y'], 'a b' = true}",
        ]
    )
    again = load(config_file=_file(tmp_path, to_toml(settings)))
    assert again.config == settings.config


def test_every_printed_value_has_its_origin() -> None:
    text = to_toml(load(assignments=["server.port=9000"]))
    assert re.search(r"^port = 9000 +# --set$", text, re.MULTILINE)
    assert re.search(r'^caching = "full" +# by cluster.mode, default$', text, re.MULTILINE)
    assert re.search(r"^# gpus is not set +# default$", text, re.MULTILINE)
    values = [line for line in text.splitlines() if " = " in line]
    assert all("  # " in line for line in values)


def test_the_keys_are_not_printed() -> None:
    assert "hunter2" not in to_toml(load(assignments=["server.api_key=hunter2"]))
    assert "hunter2" not in to_toml(load(assignments=["server.api_keys=['hunter2']"]))


def test_several_keys_are_a_list() -> None:
    assert load().config.api_keys == []
    environ = {"MEMSERVE_SERVER_API_KEYS": '["b", "c"]', "MEMSERVE_SERVER_API_KEY": "a"}
    assert load(environ=environ).config.api_keys == ["a", "b", "c"]
    with pytest.raises(ConfigError, match=r"server.api_keys: .*allowed: a list: each a string"):
        load(assignments=["server.api_keys=b,c"])


@pytest.mark.parametrize("value", ["", "\x00\x1f\x7f\n\t", 'quo"te', "\\", "😀", 1, -2.5, 1e300])
def test_toml_values(value: object) -> None:
    assert tomllib.loads(f"v = {toml_value(value)}") == {"v": value}


def test_the_reference_file_has_every_key_with_its_default(tmp_path: Path) -> None:
    """Its keys are comments, so that it changes nothing; uncommented they are the defaults."""
    text = (ROOT / "memserve.toml").read_text()
    assert not any(tomllib.loads(text).values())
    on = re.sub(r"^# (\w+ = )", r"\1", text, flags=re.MULTILINE)
    values = tomllib.loads(on)
    named = {f"{section}.{name}" for section, table in values.items() for name in table}
    engine = {f"engine.{name}" for name in engine_args.engine_defaults("cpu")}
    assert named == set(config.keys()) | engine
    without_gpus = re.sub(r"^gpus = .*$", "", on, flags=re.MULTILINE)
    assert load(config_file=_file(tmp_path, without_gpus)).config == load().config
