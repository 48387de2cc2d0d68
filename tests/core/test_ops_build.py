"""The compilation of `cuda/`: where it is cached, what renews it, what it says when it fails."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from memserve.errors import StartError, TransferError
from memserve.ops import build
from memserve.ops.build import BlockCopyLibrary, Copy, Side

try:
    NVCC: Path | None = build.find_nvcc()
except StartError:
    NVCC = None

needs_nvcc = pytest.mark.skipif(NVCC is None, reason="no nvcc on this machine")
ARCH = "sm_90"

FakeNvcc = Callable[..., Path]


@pytest.fixture
def fake_nvcc(tmp_path: Path) -> FakeNvcc:
    """A compiler that counts its runs and writes `output`, or fails with it."""

    def make(output: str = "built", *, code: int = 0, version: str = "13.0") -> Path:
        folder = tmp_path / f"toolkit-{version}"
        folder.mkdir(exist_ok=True)
        script = folder / "nvcc"
        write = (
            f'for last; do :; done; echo "{output}" >"$last"' if code == 0 else f"echo '{output}'"
        )
        script.write_text(
            f'#!/bin/sh\n[ "$1" = --version ] && echo {version} && exit 0\n'
            f"echo run >>{tmp_path}/runs\n{write}\nexit {code}\n"
        )
        script.chmod(0o755)
        return script

    return make


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of `cuda/` that may be changed."""
    folder = tmp_path / "sources"
    shutil.copytree(build.SOURCE_DIR, folder)
    monkeypatch.setattr(build, "SOURCE_DIR", folder)
    return folder


def num_runs(tmp_path: Path) -> int:
    runs = tmp_path / "runs"
    return len(runs.read_text().splitlines()) if runs.exists() else 0


# ── with the real compiler ────────────────────────────────────────────────────────────────────


@needs_nvcc
def test_the_library_compiles_without_warnings_and_opens(tmp_path: Path) -> None:
    path = build.build_library(ARCH, cache_dir=tmp_path)
    assert list(tmp_path.iterdir()) == [path]
    library = BlockCopyLibrary(path)
    with pytest.raises(TransferError, match=r"cannot copy -1 blocks on GPU 0: .*cudaErrorInvalid"):
        library.copy_blocks(Copy(num_blocks=-1), 0, 16, 0, 0)
    library.copy_blocks(Copy(num_blocks=0), 0, 16, 0, 0)


@needs_nvcc
def test_the_check_compiles_without_warnings(tmp_path: Path) -> None:
    program = tmp_path / "check"
    build.build_check(ARCH, program)
    answer = subprocess.run(
        [program, "--what"], capture_output=True, text=True, timeout=30, check=False
    )
    assert (answer.returncode, answer.stderr) == (2, f"usage: {program} [--quick]\n")


@needs_nvcc
def test_the_structures_are_those_of_the_header(tmp_path: Path) -> None:
    """Sizes and offsets as the compiler lays them out."""
    fields = [
        *((Side, "MemserveSide", name) for name, _ in Side._fields_),
        *((Copy, "MemserveCopy", name) for name, _ in Copy._fields_),
    ]
    answers = [f'printf("%zu ", offsetof({struct}, {name}));' for _, struct, name in fields]
    program = tmp_path / "layout.cpp"
    program.write_text(
        f'#include <cstddef>\n#include <cstdio>\n#include "{build.SOURCE_DIR}/block_copy.h"\n'
        f"int main() {{ {''.join(answers)}"
        ' printf("%zu %zu", sizeof(MemserveSide), sizeof(MemserveCopy)); }\n'
    )
    built = tmp_path / "layout"
    subprocess.run([str(NVCC), program, "-o", built], check=True, timeout=120, capture_output=True)
    told = subprocess.run([built], check=True, timeout=30, capture_output=True, text=True).stdout
    expected = [getattr(struct, name).offset for struct, _, name in fields]
    assert [int(number) for number in told.split()] == [
        *expected,
        ctypes.sizeof(Side),
        ctypes.sizeof(Copy),
    ]


@needs_nvcc
def test_a_broken_source_is_told_in_one_line(sources: Path, tmp_path: Path) -> None:
    with (sources / "block_copy.cu").open("a") as file:
        file.write("\nint broken = no_such_name;\n")
    with pytest.raises(StartError) as caught:
        build.build_library(ARCH, cache_dir=tmp_path / "cache")
    assert "no_such_name" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "cache").iterdir()) == []


# ── with a compiler that only counts ──────────────────────────────────────────────────────────


def test_a_library_is_built_once(tmp_path: Path, fake_nvcc: FakeNvcc) -> None:
    nvcc = fake_nvcc()
    first = build.build_library(ARCH, cache_dir=tmp_path / "cache", nvcc=nvcc)
    assert build.build_library(ARCH, cache_dir=tmp_path / "cache", nvcc=nvcc) == first
    assert num_runs(tmp_path) == 1
    assert first.read_text() == "built\n"


def test_whatever_goes_into_a_library_makes_another_one(
    tmp_path: Path, sources: Path, fake_nvcc: FakeNvcc
) -> None:
    def path(arch: str = ARCH, version: str = "13.0") -> Path:
        nvcc = fake_nvcc(version=version)
        return build.build_library(arch, cache_dir=tmp_path / "cache", nvcc=nvcc)

    paths = [path(), path("sm_80"), path(version="13.1")]
    for name in ("block_copy.cu", "block_copy.h"):
        with (sources / name).open("a") as file:
            file.write("// changed\n")
        paths.append(path())
    assert len(set(paths)) == len(paths) == num_runs(tmp_path)


def test_the_check_is_no_part_of_the_library(
    tmp_path: Path, sources: Path, fake_nvcc: FakeNvcc
) -> None:
    nvcc, cache = fake_nvcc(), tmp_path / "cache"
    before = build.build_library(ARCH, cache_dir=cache, nvcc=nvcc)
    (sources / "block_copy_check.cu").write_text("// changed\n")
    assert build.build_library(ARCH, cache_dir=cache, nvcc=nvcc) == before


def test_a_failed_build_leaves_nothing(tmp_path: Path, fake_nvcc: FakeNvcc) -> None:
    nvcc = fake_nvcc("block_copy.cu(7): error: what is this", code=2)
    with pytest.raises(StartError, match=r"exit status 2\): block_copy.cu\(7\): error: what") as e:
        build.build_library(ARCH, cache_dir=tmp_path / "cache", nvcc=nvcc)
    assert list((tmp_path / "cache").iterdir()) == []
    assert "what is this" in e.value.__notes__[0]


def test_a_compiler_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_BUILD_TIMEOUT_S", 0.05)
    with pytest.raises(StartError, match="more than 0 s"):
        build.compile_to(tmp_path / "library.so", ["/bin/sh", "-c", "exec sleep 60"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arch", ["", "90", "sm_9", "sm_90 -o /etc", "compute_90"])
def test_what_is_no_architecture_is_refused(arch: str, fake_nvcc: FakeNvcc) -> None:
    with pytest.raises(StartError, match="no GPU architecture; one looks like sm_90"):
        build.build_library(arch, nvcc=fake_nvcc())


def test_missing_sources_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_nvcc: FakeNvcc
) -> None:
    monkeypatch.setattr(build, "SOURCE_DIR", tmp_path / "nowhere")
    with pytest.raises(StartError, match=r"nowhere/block_copy\.cu is missing"):
        build.build_library(ARCH, nvcc=fake_nvcc())


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "library.so"
    path.write_text("text")
    with pytest.raises(StartError, match="is no library of MemServe's"):
        BlockCopyLibrary(path)


# ── where things are ──────────────────────────────────────────────────────────────────────────


def test_cuda_home_comes_before_the_path(tmp_path: Path, fake_nvcc: FakeNvcc) -> None:
    on_path, at_home = fake_nvcc(version="1"), tmp_path / "home"
    (at_home / "bin").mkdir(parents=True)
    shutil.copy(on_path, at_home / "bin" / "nvcc")
    environ = {"PATH": str(on_path.parent), "CUDA_HOME": str(at_home)}
    assert build.find_nvcc(environ) == at_home / "bin" / "nvcc"
    assert build.find_nvcc(environ | {"CUDA_HOME": str(tmp_path)}) == on_path


def test_the_usual_place_is_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "USUAL_NVCC", tmp_path / "nvcc")
    with pytest.raises(StartError, match="put nvcc on the PATH or set CUDA_HOME"):
        build.find_nvcc({"PATH": ""})
    build.USUAL_NVCC.touch(mode=0o755)
    assert build.find_nvcc({"PATH": ""}) == tmp_path / "nvcc"


def test_the_cache_is_the_users(tmp_path: Path) -> None:
    inside = Path("memserve", "cuda")
    assert build.default_cache_dir({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / inside
    assert build.default_cache_dir({"XDG_CACHE_HOME": "rel"}) == Path.home() / ".cache" / inside
    assert build.default_cache_dir({}) == Path.home() / ".cache" / inside
