"""What `[models] loras` may name, and what the engine is asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memserve.errors import ConfigError
from memserve.loras import engine_arguments, find_loras
from memserve.types import Lora


def adapter(folder: Path, rank: object = 4, weights: str = "adapter_model.safetensors") -> str:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank, "lora_alpha": 8}))
    (folder / weights).touch()
    return str(folder)


def test_adapters_are_numbered_in_order(tmp_path: Path) -> None:
    folders = {"sql": adapter(tmp_path / "x"), "chat": adapter(tmp_path / "y", rank=9)}
    assert find_loras(folders, "model") == [
        Lora("sql", 1, str(tmp_path / "x"), 4),
        Lora("chat", 2, str(tmp_path / "y"), 9),
    ]


def test_a_path_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter(tmp_path / "x")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for relative in ("x", "./x", "~/x"):
        assert find_loras({"sql": relative}, "model")[0].path == str(tmp_path / "x")


def test_the_engine_is_asked_for_room_for_all_of_them() -> None:
    loras = [Lora("a", 1, "/a", 4), Lora("b", 2, "/b", 9)]
    expected = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 16}
    assert engine_arguments(loras) == expected
    assert engine_arguments([]) == {}


def refused(folders: dict[str, str], served_name: str = "model") -> str:
    with pytest.raises(ConfigError) as caught:
        find_loras(folders, served_name)
    return str(caught.value)


def test_what_cannot_be_served_is_named_with_its_key(tmp_path: Path) -> None:
    good = adapter(tmp_path / "good")
    missing = refused({"sql": str(tmp_path / "nowhere")})
    assert missing.startswith("models.loras.sql: ") and "nowhere" in missing
    assert "adapter_config.json" in missing
    assert "name of the model itself" in refused({"model": good})
    assert "no name" in refused({"": good})
    for rank in (0, 513):
        assert f"rank {rank}" in refused({"sql": adapter(tmp_path / f"rank{rank}", rank)})
    assert "weights" in refused({"sql": adapter(tmp_path / "empty", weights="readme.md")})
    for number, rank in enumerate(("four", None)):
        text = refused({"sql": adapter(tmp_path / f"bad{number}", rank)})
        assert text.startswith("models.loras.sql: ") and "adapter_config.json" in text
    assert "nobody-of-this-name" in refused({"sql": "~nobody-of-this-name/x"})
    assert "null" in refused({"sql": "a\0b"})
