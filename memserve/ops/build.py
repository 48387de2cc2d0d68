"""Builds `cuda/` with nvcc, once per GPU architecture, and opens the result through ctypes.

The library is built when it is first asked for and kept in the user's cache folder, under a name
that depends on everything that went into it: sources, compiler, flags and architecture. So nothing
is compiled at installation, and a changed source can never meet an old library.

Collaborators: `blocks.py` describes copies and checks them; `device_memory.py` has the rest of the
library; `cuda/block_copy.h` is the interface that the structures below mirror.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from memserve.errors import StartError, TransferError

SOURCE_DIR = Path(__file__).resolve().parents[2] / "cuda"
LIBRARY_SOURCES = ("block_copy.cu", "device_memory.cu", "nccl_pipe.cu")
CHECK_SOURCES = ("block_copy.cu", "block_copy_check.cu")
USUAL_NVCC = Path("/usr/local/cuda/bin/nvcc")

_FLAGS = (
    "-O3",
    "-std=c++17",
    "-lineinfo",
    "-Werror=all-warnings",
    "-Xcompiler=-Wall,-Wextra,-fPIC,-fvisibility=hidden",
)
_BUILD_TIMEOUT_S = 300.0
_VERSION_TIMEOUT_S = 10.0


class Side(ctypes.Structure):
    """`MemserveSide`: where one side's rows lie."""

    _fields_ = (
        ("base", ctypes.c_uint64),
        ("block_stride", ctypes.c_int64),
        ("row_stride", ctypes.c_int64),
        ("layer_offsets", ctypes.c_void_p),
        ("block_ids", ctypes.c_void_p),
    )


class Copy(ctypes.Structure):
    """`MemserveCopy`: what is copied. The arrays that its sides point to are the caller's."""

    _fields_ = (
        ("source", Side),
        ("target", Side),
        ("row_bytes", ctypes.c_int64),
        ("num_rows", ctypes.c_int32),
        ("num_layers", ctypes.c_int32),
        ("num_blocks", ctypes.c_int32),
        ("counter", ctypes.c_void_p),
    )


class Nccl(ctypes.Structure):
    """`MemserveNccl`: addresses of NCCL's functions."""

    _fields_ = (
        ("get_async_error", ctypes.c_void_p),
        ("group_start", ctypes.c_void_p),
        ("group_end", ctypes.c_void_p),
        ("send", ctypes.c_void_p),
        ("receive", ctypes.c_void_p),
    )


class PipeConfig(ctypes.Structure):
    """`MemservePipeConfig`: the blocks, the staging memory and the communicator of a pipe."""

    _fields_ = (
        ("nccl", Nccl),
        ("communicator", ctypes.c_void_p),
        ("blocks", Side),
        ("row_bytes", ctypes.c_int64),
        ("num_rows", ctypes.c_int32),
        ("num_layers", ctypes.c_int32),
        ("slots", ctypes.c_uint64 * 2),
        ("slot_blocks", ctypes.c_int32),
        ("peer", ctypes.c_int32),
        ("is_sender", ctypes.c_int32),
        ("pieces", ctypes.c_int32),
        ("max_sms", ctypes.c_int32),
        ("max_ahead", ctypes.c_int32),
        ("device", ctypes.c_int32),
    )


class PipeCounts(ctypes.Structure):
    """`MemservePipeCounts`: pieces put, launched and finished so far."""

    _fields_ = (
        ("put", ctypes.c_int64),
        ("launched", ctypes.c_int64),
        ("finished", ctypes.c_int64),
        ("nccl_error", ctypes.c_int32),
    )


class BlockCopyLibrary:
    """The built library. It has no state of its own: any thread may call it."""

    def __init__(self, path: Path) -> None:
        """Raises: StartError if the file is no such library."""
        try:
            self._functions = ctypes.CDLL(str(path))
            _declare(self._functions)
        except (OSError, AttributeError) as error:
            raise StartError(f"{path} is no library of MemServe's: {error}") from error

    def copy_blocks(self, copy: Copy, method: int, max_sms: int, device: int, stream: int) -> None:
        """Queue a copy on a stream of `device`; `stream` is its handle. Raises: TransferError."""
        self._require(
            self._functions.memserve_copy_blocks(
                ctypes.byref(copy), method, max_sms, device, stream
            ),
            f"cannot copy {copy.num_blocks} blocks on GPU {device}",
        )

    def enable_peer_access(self, device: int, peer: int) -> None:
        """Let kernels on `device` reach the memory of `peer`. Raises: TransferError."""
        self._require(
            self._functions.memserve_enable_peer_access(device, peer),
            f"GPU {device} cannot reach the memory of GPU {peer}",
        )

    def open_pipe(self, config: PipeConfig) -> int:
        """A pipe; its handle. What `config` points to must live as long. Raises: TransferError."""
        pipe = ctypes.c_void_p()
        self._require(
            self._functions.memserve_pipe_open(ctypes.byref(config), ctypes.byref(pipe)),
            f"no pipe on GPU {config.device}",
        )
        assert pipe.value is not None
        return pipe.value

    def put_into_pipe(self, pipe: int, block_ids: int, sizes: int, num_chunks: int) -> PipeCounts:
        """`block_ids`, `sizes`: addresses of arrays of int32. Raises: TransferError."""
        counts = PipeCounts()
        code = self._functions.memserve_pipe_put(
            pipe, block_ids, sizes, num_chunks, ctypes.byref(counts)
        )
        self._require(code, f"cannot queue {num_chunks} chunks")
        return counts

    def run_pipe(self, pipe: int, finished: int, watch: int, patience_us: int) -> PipeCounts:
        """The counts may name an error of NCCL's. Raises: TransferError for one of CUDA's."""
        counts = PipeCounts()
        code = self._functions.memserve_pipe_run(
            pipe, finished, watch, patience_us, ctypes.byref(counts)
        )
        if not counts.nccl_error:
            self._require(code, "cannot move blocks")
        return counts

    def close_pipe(self, pipe: int) -> None:
        """Waits for what is queued. Raises: TransferError; the pipe is gone in any case."""
        self._require(self._functions.memserve_pipe_close(pipe), "cannot end a pipe")

    def _require(self, code: int, problem: str) -> None:
        if code:
            name = self._functions.memserve_error_name(code).decode()
            text = self._functions.memserve_error_text(code).decode()
            raise TransferError(f"{problem}: {text} ({name})")


def open_library(arch: str) -> BlockCopyLibrary:
    """The library for `arch` (`sm_90`, …), built if need be. Raises: StartError."""
    return BlockCopyLibrary(build_library(arch))


def build_library(arch: str, *, cache_dir: Path | None = None, nvcc: Path | None = None) -> Path:
    """Where the library for `arch` is, after building it if it is not there yet (some 5 s).

    Several processes may ask at once: each builds for itself, and the last one's file stays.
    Raises: StartError (no nvcc, no sources, or they do not compile).
    """
    nvcc = nvcc or find_nvcc()
    command = compile_command(nvcc, arch, LIBRARY_SOURCES, is_library=True)
    folder = cache_dir or default_cache_dir()
    path = folder / f"block_copy-{arch}-{_fingerprint(nvcc, command)}.so"
    if not path.exists():
        compile_to(path, command)
    return path


def build_check(arch: str, target: Path, *, nvcc: Path | None = None) -> None:
    """Build the stand-alone check and timer into the file `target`. Raises: StartError."""
    compile_to(target, compile_command(nvcc or find_nvcc(), arch, CHECK_SOURCES, is_library=False))


def find_nvcc(environ: Mapping[str, str] = os.environ) -> Path:
    """In $CUDA_HOME/bin, on the PATH or at `USUAL_NVCC`, in this order. Raises: StartError."""
    home = environ.get("CUDA_HOME")
    candidates = [
        Path(home, "bin", "nvcc") if home else None,
        shutil.which("nvcc", path=environ.get("PATH", "")),
        USUAL_NVCC,
    ]
    for candidate in candidates:
        if candidate is not None and os.access(candidate, os.X_OK):
            return Path(candidate)
    raise StartError(
        "no nvcc was found, and MemServe's CUDA kernels are compiled at their first use: "
        "put nvcc on the PATH or set CUDA_HOME"
    )


def default_cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Where libraries are kept: `$XDG_CACHE_HOME/memserve/cuda`, by default under ~/.cache."""
    configured = environ.get("XDG_CACHE_HOME", "")
    base = Path(configured) if os.path.isabs(configured) else Path.home() / ".cache"
    return base / "memserve" / "cuda"


def compile_command(
    nvcc: Path, arch: str, sources: Sequence[str], *, is_library: bool
) -> list[str]:
    """The command that compiles `sources` of `cuda/`, but for `-o`. Raises: StartError."""
    if not re.fullmatch(r"sm_[0-9]{2,3}[af]?", arch):
        raise StartError(f"{arch!r} is no GPU architecture; one looks like sm_90")
    files = [str(SOURCE_DIR / name) for name in sources]
    missing = [file for file in files if not os.path.exists(file)]
    if missing:
        raise StartError(f"{missing[0]} is missing: the kernels' sources come with the repository")
    target = f"-gencode=arch={arch.replace('sm_', 'compute_')},code={arch}"
    return [str(nvcc), *_FLAGS, target, *(["-shared"] if is_library else []), *files]


def compile_to(target: Path, command: Sequence[str]) -> None:
    """Run the compiler; `target` appears whole or not at all. Raises: StartError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="building-") as folder:
        built = Path(folder, target.name)
        try:
            done = subprocess.run(
                [*command, "-o", str(built)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=_BUILD_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise StartError(f"nvcc took more than {_BUILD_TIMEOUT_S:.0f} s") from error
        if done.returncode != 0 or not built.exists():
            raise _compile_error(done.returncode, done.stdout)
        built.replace(target)


def _compile_error(code: int, output: str) -> StartError:
    """One line for the user, all that the compiler said as a note."""
    lines = [line for line in output.splitlines() if line.strip()] or ["it said nothing"]
    first = next((line for line in lines if "error" in line or "fatal" in line), lines[-1])
    error = StartError(f"nvcc could not compile the kernels (exit status {code}): {first.strip()}")
    error.add_note(output)
    return error


def _fingerprint(nvcc: Path, command: Sequence[str]) -> str:
    """A digest of the sources, the compiler and its flags, but not of where they lie."""
    digest = hashlib.sha256()
    digest.update(_version(nvcc).encode())
    digest.update("\0".join(part for part in command if part.startswith("-")).encode())
    headers = sorted(SOURCE_DIR.glob("*.h")) + sorted(SOURCE_DIR.glob("*.cuh"))
    for source in [*headers, *(SOURCE_DIR / name for name in LIBRARY_SOURCES)]:
        digest.update(source.name.encode())
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _version(nvcc: Path) -> str:
    try:
        return subprocess.run(
            [str(nvcc), "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_VERSION_TIMEOUT_S,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise StartError(f"{nvcc} does not run: {error}") from error


def _declare(functions: ctypes.CDLL) -> None:
    """Argument types: without them ctypes would cut pointers to 32 bits."""
    functions.memserve_copy_blocks.argtypes = (
        ctypes.POINTER(Copy),
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_void_p,
    )
    functions.memserve_copy_blocks.restype = ctypes.c_int
    functions.memserve_enable_peer_access.argtypes = (ctypes.c_int, ctypes.c_int)
    functions.memserve_enable_peer_access.restype = ctypes.c_int
    pointer, integer, long = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    counts = ctypes.POINTER(PipeCounts)
    functions.memserve_pipe_open.argtypes = (ctypes.POINTER(PipeConfig), ctypes.POINTER(pointer))
    functions.memserve_pipe_put.argtypes = (pointer, pointer, pointer, integer, counts)
    functions.memserve_pipe_run.argtypes = (pointer, long, integer, long, counts)
    functions.memserve_pipe_close.argtypes = (pointer,)
    for name in (functions.memserve_error_name, functions.memserve_error_text):
        name.argtypes = (ctypes.c_int,)
        name.restype = ctypes.c_char_p
