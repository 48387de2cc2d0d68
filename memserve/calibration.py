"""`memserve calibrate`: measure the configured model on this machine, keep the cost profile.

The measuring needs the engine, and is a process of its own (`workers/calibrate.py`); here it is
started, its progress passed on, its samples fitted (`core/cost_fit.py`) and the profile stored
(`profiles.py`).
"""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from memserve.config import Config, engine_settings, tp_in_force
from memserve.core.builtin import built_in
from memserve.core.cost_fit import fit_operators
from memserve.core.cost_model import CostModel
from memserve.core.cost_samples import Samples
from memserve.core.profile import Profile
from memserve.engine_args import count_gpus
from memserve.errors import ConfigError, StartError
from memserve.models import resolve_model
from memserve.profiles import check_writable, key_of, num_threads, path_of, save
from memserve.workers.environment import set_engine_environment
from memserve.workers.spec import CalibrationJob

Report = Callable[[str], None]

_TIMEOUT_S = 1800.0
_END_TIMEOUT_S = 10.0
_MOST_ERROR_CHARS = 400
_SUMMARY_TOKENS = (512, 2048, 8192)


def calibrate(
    config: Config, report: Report, out: Path | None = None, samples_file: Path | None = None
) -> tuple[Profile, Path]:
    """Measure, fit and store; where it was stored. Takes minutes.

    `out`: None for the user's cache folder. `samples_file`: keep the measurements there too.
    Raises: MemServeError.
    """
    key = key_of(config)
    path = out or path_of(key)
    if path == samples_file:
        raise ConfigError("--samples", f"{path} is where the profile goes")
    for file in filter(None, (path, samples_file)):
        check_writable(file)
    model = resolve_model(config.models.model, report)
    job = CalibrationJob(
        name=config.models.model,
        model=str(model),
        engine=engine_settings(config),
        kv_bytes=config.kv_bytes if config.cluster.device == "cpu" else None,
        layout=config.mempool.layout,
        num_threads=num_threads(config),
        log_level="error",
        device=key.device,
        dtype=key.dtype,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        reduce_ranks=_reduce_ranks(config),
    )
    samples = _measure(job, report, samples_file)
    try:
        profile = fit_operators(samples, built_in(samples.shape, key.device))
    except ValueError as error:
        raise StartError(f"the measurements give no profile: {error}") from error
    save(profile, path)
    return profile, path


def _reduce_ranks(config: Config) -> int:
    """As many as an instance will have, or two where there are as many GPUs."""
    ranks = max(2, *tp_in_force(config).values())
    return ranks if config.cluster.device == "cuda" and count_gpus() >= ranks else 0


def summary(profile: Profile) -> list[str]:
    """What a profile says, in a few lines."""
    model = CostModel(profile)
    lines = [profile.describe(), f"all-reduce over several GPUs: {profile.reduce.source}"]
    for tokens in _SUMMARY_TOKENS:
        cold, warm = model.exec_s(tokens), model.exec_s(tokens, tokens * 3 // 4)
        lines.append(
            f"prefill of {tokens}: {cold * 1e3:.1f} ms, with 3/4 cached {warm * 1e3:.1f} ms"
        )
    step_s = model.decode_step_s(1, _SUMMARY_TOKENS[0])
    lines.append(f"decode step of one request: {step_s * 1e3:.1f} ms")
    if profile.error is not None:
        lines.append(f"mean error over the prefills it was fitted to: {profile.error:.1%}")
    return lines


def _measure(job: CalibrationJob, report: Report, keep: Path | None) -> Samples:
    """Run the measuring process, in a folder of its own. Raises: StartError."""
    environment: dict[str, str] = dict(os.environ)
    set_engine_environment(environment, num_threads=job.num_threads, log_level=job.log_level)
    with tempfile.TemporaryDirectory(prefix="memserve-calibrate-") as folder:
        job_file, found = Path(folder) / "job.json", Path(folder) / "samples.json"
        job_file.write_bytes(msgspec.json.encode(job))
        command = [sys.executable, "-m", "memserve.workers.calibrate", str(job_file), str(found)]
        run_process(command, environment, Path(folder) / "stderr", report)
        data = found.read_bytes()
        if keep is not None:
            keep.write_bytes(data)
        return msgspec.json.decode(data, type=Samples)


def run_process(
    command: list[str],
    environment: Mapping[str, str],
    errors: Path,
    report: Report,
    timeout_s: float = _TIMEOUT_S,
) -> None:
    """Run it, and report its lines as they come. It ends with this call, whatever ends the call.

    Raises: StartError, with the last line of its stderr, if it fails or takes too long.
    """
    with errors.open("wb") as stderr:
        process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    assert process.stdout is not None
    watchdog = threading.Timer(timeout_s, process.kill)
    watchdog.start()
    try:
        for line in process.stdout:
            report(line.rstrip())
        status = process.wait(_END_TIMEOUT_S)
    finally:
        is_late = watchdog.finished.is_set()
        watchdog.cancel()
        process.kill()
        process.wait(_END_TIMEOUT_S)
        process.stdout.close()
    if is_late:
        raise StartError(f"the calibration took longer than {timeout_s:g} s")
    if status != 0:
        lines = errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        last = lines[-1] if lines else f"exit status {status}"
        raise StartError(f"the calibration failed: {last[:_MOST_ERROR_CHARS]}")
