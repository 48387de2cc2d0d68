"""`memserve calibrate` without an engine: the process it starts, the fit, what the command says."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec
import pytest

from memserve import calibration, cli
from memserve.config import Config
from memserve.core.builtin import BUILT_IN
from memserve.core.cost_samples import Samples
from memserve.errors import StartError
from memserve.profiles import load
from memserve.workers.spec import CalibrationJob
from tests.core.test_cost_fit import STEP, measure, noise_of, truth


def run(script: str, folder: Path, timeout_s: float = 60.0) -> list[str]:
    lines: list[str] = []
    command = [sys.executable, "-c", script]
    calibration.run_process(command, os.environ, folder / "stderr", lines.append, timeout_s)
    return lines


def test_progress_is_passed_on(tmp_path: Path) -> None:
    assert run("print('one'); print('two')", tmp_path) == ["one", "two"]


def test_a_failure_is_told_by_its_last_line(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"the calibration failed: no room$"):
        run("import sys; sys.exit('a lot of text\\nno room')", tmp_path)
    with pytest.raises(StartError, match="exit status 3"):
        run("import os; os._exit(3)", tmp_path)


def test_a_process_that_hangs_is_ended(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"longer than 0\.05 s"):
        run("import threading; threading.Event().wait()", tmp_path, timeout_s=0.05)


def test_no_process_outlives_an_interruption(tmp_path: Path) -> None:
    script = "import os, threading; print(os.getpid(), flush=True); threading.Event().wait()"
    pids: list[int] = []

    def interrupt(line: str) -> None:
        pids.append(int(line))
        raise KeyboardInterrupt

    command = [sys.executable, "-c", script]
    with pytest.raises(KeyboardInterrupt):
        calibration.run_process(command, os.environ, tmp_path / "stderr", interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Samples:
    """Instead of measuring: the samples of a known device."""
    samples = measure(truth(STEP), noise_of(0))

    def fake(job: CalibrationJob, report: calibration.Report, keep: Path | None) -> Samples:
        report(f"measuring {job.name}")
        if keep is not None:
            keep.write_bytes(msgspec.json.encode(samples))
        return samples

    monkeypatch.setattr(calibration, "_measure", fake)
    return samples


def test_the_command_measures_fits_and_keeps(
    measured: Samples, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").touch()  # a folder with one is a model
    out, kept = tmp_path / "new" / "profile.json", tmp_path / "samples.json"
    arguments = ["--model", str(tmp_path), "--out", str(out), "--samples", str(kept)]
    assert cli.invoke(["calibrate", *arguments]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"measuring {tmp_path}\n")
    assert "\ncalibrated at an unknown time for m, GPU, bfloat16, e\n" in printed
    assert printed.endswith(f"profile: {out}\n")
    assert load(out).source == "calibrated"
    assert msgspec.json.decode(kept.read_bytes(), type=Samples) == measured


def test_without_a_file_it_goes_into_the_cache_folder(
    measured: Samples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "config.json").touch()
    assert cli.invoke(["calibrate", "--model", str(tmp_path)]) == 0
    assert len(list((tmp_path / "memserve" / "profiles").glob("*.json"))) == 1


def test_a_wrong_place_is_a_mistake_told_before_anything_is_measured(
    measured: Samples, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").touch()
    out = tmp_path / "config.json" / "profile.json"
    assert cli.invoke(["calibrate", "--model", str(tmp_path), "--out", str(out)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("memserve: error: ")
    assert captured.err.count("\n") == 1


def test_profile_and_samples_are_two_files(
    measured: Samples, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").touch()
    both = str(tmp_path / "file")
    arguments = ["--model", str(tmp_path), "--out", both, "--samples", both]
    assert cli.invoke(["calibrate", *arguments]) == 2
    assert "--samples" in capsys.readouterr().err
    assert not (tmp_path / "file").exists()


def test_measurements_that_give_no_profile_are_one_error(
    measured: Samples, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    empty = msgspec.structs.replace(measured, attention=[])
    monkeypatch.setattr(calibration, "_measure", lambda *arguments: empty)
    (tmp_path / "config.json").touch()
    config = msgspec.structs.replace(Config(), models=Config().models)
    config = msgspec.structs.replace(
        config, models=msgspec.structs.replace(config.models, model=str(tmp_path))
    )
    config = msgspec.structs.replace(
        config, cluster=msgspec.structs.replace(config.cluster, device="cpu")
    )
    with pytest.raises(StartError, match="operators attention"):
        calibration.calibrate(config, lambda text: None, tmp_path / "p.json")


def test_a_summary_says_where_the_profile_comes_from() -> None:
    lines = calibration.summary(BUILT_IN)
    assert "built in" in lines[0]
    assert not any("error" in line for line in lines)
