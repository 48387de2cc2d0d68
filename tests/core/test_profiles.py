"""Keeping profiles: names, files, which one is in force, what the device is called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from memserve import profiles
from memserve.config import (
    ClusterConfig,
    Config,
    MempoolConfig,
    ModelsConfig,
    SchedulerConfig,
    TransferConfig,
)
from memserve.core.builtin import BUILT_IN
from memserve.core.profile import FORMAT
from memserve.errors import ConfigError
from memserve.profiles import ProfileKey

KEY = ProfileKey("/models/Llama-2-13b", "NVIDIA H200", "auto", "vllm 0.32.0")
CALIBRATED = msgspec.structs.replace(BUILT_IN, source="calibrated")
CONFIG = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}


def test_a_file_is_named_by_what_the_profile_is_for(tmp_path: Path) -> None:
    path = profiles.path_of(KEY, tmp_path)
    assert path == tmp_path / "llama_2_13b-nvidia_h200-auto-vllm_0.32.0.json"


def test_profiles_lie_in_the_user_s_cache_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert profiles.path_of(KEY).parent == tmp_path / "memserve" / "profiles"


@pytest.mark.parametrize("field", ["model", "device", "dtype", "engine"])
def test_another_model_device_type_or_engine_is_another_profile(field: str) -> None:
    other = msgspec.structs.replace(KEY, **{field: "other"})
    assert profiles.path_of(other, Path()) != profiles.path_of(KEY, Path())


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "p.json"
    profiles.save(CALIBRATED, path)
    assert profiles.load(path) == CALIBRATED
    assert [file.name for file in path.parent.iterdir()] == ["p.json"]


def test_a_calibrated_profile_is_preferred(tmp_path: Path) -> None:
    assert profiles.in_force(KEY, None, tmp_path).source.startswith("built in")
    profiles.save(CALIBRATED, profiles.path_of(KEY, tmp_path))
    assert profiles.in_force(KEY, None, tmp_path) == CALIBRATED


def test_a_built_in_profile_has_the_model_s_shape(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    profile = profiles.in_force(KEY, file, tmp_path)
    assert profile.shape.num_layers == 32
    assert "H200" in profile.source


@pytest.mark.parametrize("text", ["{", "{}", "[]"])
def test_without_a_shape_the_bundled_model_s_is_assumed_and_said(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    profile = profiles.in_force(KEY, file, tmp_path)
    assert profile.shape == BUILT_IN.shape
    assert "smollm2" in profile.source


def test_a_configuration_has_a_profile(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    config = Config(models=ModelsConfig(model="some/model"))
    profile = profiles.for_config(config, str(tmp_path), tmp_path)
    assert profile.shape.num_layers == 32
    assert profiles.key_of(config).model == "some/model"
    profiles.save(CALIBRATED, profiles.path_of(profiles.key_of(config), tmp_path))
    assert profiles.for_config(config, str(tmp_path), tmp_path) == CALIBRATED


@pytest.fixture
def grouped(tmp_path: Path) -> Path:
    """A model of 12 heads and 4 KV heads."""
    heads = {"num_attention_heads": 12, "num_key_value_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | heads))
    return tmp_path


def split_by(tp: int | str) -> Config:
    return Config(cluster=ClusterConfig(device="cpu", tp=tp))


@pytest.mark.parametrize("tp", [1, 2, "P=4,D=1", 12])
def test_ranks_share_kv_heads_or_repeat_them(grouped: Path, tp: int | str) -> None:
    profiles.check_tp(split_by(tp), str(grouped))


@pytest.mark.parametrize(("tp", "degree"), [(3, 3), ("P=1,D=6", 6), (5, 5), ("P=24,D=1", 24)])
def test_ranks_that_cannot_share_the_heads_are_refused(
    grouped: Path, tp: int | str, degree: int
) -> None:
    with pytest.raises(ConfigError, match=rf"cluster\.tp: {degree} ranks .* 1, 2, 4, 12$"):
        profiles.check_tp(split_by(tp), str(grouped))


def test_a_model_of_unknown_shape_is_left_to_the_engine(tmp_path: Path) -> None:
    profiles.check_tp(split_by(5), str(tmp_path))


def test_a_profile_of_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    profiles.save(msgspec.structs.replace(CALIBRATED, format=0), path)
    with pytest.raises(ConfigError, match=f"format 0, not {FORMAT}; allowed: a file"):
        profiles.load(path)


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff", b'{"source": 3}'])
def test_what_is_no_profile_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"p\.json is no profile"):
        profiles.load(path)


@pytest.mark.parametrize(
    ("lacks", "changes", "named"),
    [
        (
            "nccl",
            {"transfer": TransferConfig(link="nccl")},
            r"transfer.link: .*'nccl'.*: dram, shm",
        ),
        ("shm", {}, "transfer.link: .*'shm'"),
        ("dram", {"mempool": MempoolConfig(dram_gb=1.0)}, "mempool.dram_gb: .*'dram'"),
    ],
)
def test_links_whose_costs_are_unknown_are_refused_by_name(
    lacks: str, changes: dict[str, Any], named: str
) -> None:
    config = Config(cluster=ClusterConfig(device="cpu"), **changes)
    fit = BUILT_IN.links["dram"]
    links = dict.fromkeys(("shm", "nccl", "dram"), fit)
    profiles.check_links(config, msgspec.structs.replace(CALIBRATED, links=dict(links)))
    del links[lacks]
    profile = msgspec.structs.replace(CALIBRATED, links=links)
    with pytest.raises(ConfigError, match=named) as caught:
        profiles.check_links(config, profile)
    assert "calibrated at" in str(caught.value)
    others = msgspec.structs.replace(config, scheduler=SchedulerConfig(policy="prefix"))
    profiles.check_links(others, profile)


def test_a_place_that_cannot_be_written_is_seen_beforehand(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "p.json", tmp_path):
        with pytest.raises(ConfigError, match="cannot write"):
            profiles.check_writable(path)
    profiles.check_writable(tmp_path / "new" / "p.json")


def test_devices_are_named_without_asking_them(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("processor\t: 0\nmodel name\t: Some CPU\n\n")
    assert profiles.device_name("cpu", 2, tmp_path) == "cpu Some CPU x2"
    for number, name in enumerate(("NVIDIA H200", "NVIDIA A100")):
        folder = tmp_path / f"proc/driver/nvidia/gpus/0000:0{number}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t {name}\nIRQ:   1\n")
    assert profiles.device_name("cuda", 1, tmp_path) == "NVIDIA H200"
