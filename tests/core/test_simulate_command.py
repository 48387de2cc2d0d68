"""`memserve simulate` from its flags to its figures, and what it says to mistakes."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from memserve import cli
from memserve.core.builtin import built_in
from memserve.simulator.objectives import Objectives
from memserve.simulator.plots import histogram, over_time
from memserve.simulator.report import show, spread, summarize
from memserve.simulator.setup import MODELS
from memserve.simulator.simulation import Outcome, Result, Traffic, Work

SMALL = ["simulate", "--requests", "12", "--rate", "5", "--blocks", "800"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.invoke([*SMALL, *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_json_has_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--json", "--mode", "1P1D-CC", "--slo-ttft-s", "1")
    assert code == 0
    figures = json.loads(out)
    assert (figures["requests"], figures["failed"]) == (12, 0)
    assert figures["goodput"] == 1.0
    assert figures["ttft_s"]["mean"] < figures["jct_s"]["mean"]
    assert figures["transfers"]["forward"] > 0


def test_a_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys)
    assert code == 0
    assert "12 requests, 0 failed" in out
    assert "TTFT" in out and "█" in out


def test_goodput_is_shown_with_what_it_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert "goodput" not in run(capsys)[1]
    out = run(capsys, "--slo-ttft-s", "2", "--slo-tpot-s", "0.5")[1]
    assert "goodput (TTFT ≤ 2 s, TPOT ≤ 0.5 s): 100.0%" in out


def test_what_is_printed_as_a_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "run.svg"
    assert run(capsys, "--svg", str(path))[0] == 0
    assert "TTFT" in path.read_text() and path.read_text().startswith("<svg")


def test_a_profile_says_for_how_many_ranks_it_is(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    profile = built_in(MODELS["llama-3.1-8b"], "H200", model="big")
    path = tmp_path / "profile.json"
    path.write_bytes(msgspec.json.encode(profile))
    times = [
        json.loads(run(capsys, "--json", "--profile", str(path), *flags)[1])["tpot_s"]["mean"]
        for flags in ((), ("--tp", "1"), ("--tp", "4"))
    ]
    assert times[0] == times[1] > times[2]


def test_a_trace_in_several_copies(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    record = {"prompt": [["m", 100]], "output_tokens": 5}
    path.write_text(
        "".join(f"{json.dumps({**record, 'session': n, 'arrival_s': n})}\n" for n in range(4))
    )
    trace = ("--json", "--dataset", str(path))
    code, out, _ = run(capsys, *trace, "--copies", "2", "--rate", "4", "--requests", "7")
    assert (code, json.loads(out)["requests"]) == (0, 7)
    assert json.loads(out)["duration_s"] < 4.0
    code, _, err = run(capsys, *trace, "--copies", "2500000")
    assert code == 2 and "--copies" in err and "up to 2,000,000" in err


def test_how_long_kv_may_wait_for_room_at_d_can_be_set(capsys: pytest.CaptureFixture[str]) -> None:
    """D holds a few of these at a time."""
    shape = ("documents=12", "document_tokens=400", "turns=1", "reply_tokens=300")
    load = ["--mode", "1P1D-CC", "--rate", "50", "--blocks", "150", "--json"]
    load += [word for text in shape for word in ("--synthetic", text)]

    def handed_over(room_wait_s: float) -> int:
        code, out, _ = run(capsys, *load, "--set", f"transfer.room_wait_s={room_wait_s}")
        assert code == 0
        return json.loads(out)["transfers"]["forward"]  # type: ignore[no-any-return]

    assert handed_over(300.0) == 12 > handed_over(0.001)


def test_roles_may_have_different_degrees(capsys: pytest.CaptureFixture[str]) -> None:
    load = ("--json", "--rate", "0.5", "--blocks", "9000", "--synthetic", "user_tokens=4000")
    by_tp = {
        tp: json.loads(run(capsys, *load, "--tp", tp)[1]) for tp in ("1", "2", "P=2,D=1", "P=1,D=2")
    }
    ttft, tpot = (
        {tp: found[name]["mean"] for tp, found in by_tp.items()} for name in ("ttft_s", "tpot_s")
    )
    for name, like, unlike in (("P=2,D=1", "2", "1"), ("P=1,D=2", "1", "2")):
        assert ttft[name] == pytest.approx(ttft[like], rel=0.1)
        assert tpot[name] == pytest.approx(tpot[unlike], rel=0.02)
    assert ttft["1"] > 1.5 * ttft["2"] and tpot["1"] > 1.3 * tpot["2"]


def test_a_pool_has_what_the_memory_of_its_instance_leaves(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ("simulate", "--requests", "2", "--tp", "P=2,D=1")
    assert cli.invoke(list(arguments)) == 0
    assert "50,945 or 111,455 blocks of 16" in capsys.readouterr().out


def test_a_device_is_known_by_a_part_of_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    figures = [
        json.loads(run(capsys, "--json", "--device", name)[1])["jct_s"]["mean"]
        for name in ("H100", "h100", "NVIDIA H100 80GB HBM3", "H200")
    ]
    assert figures[0] == figures[1] == figures[2] > figures[3]


def test_a_line_for_each_request(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "calls.csv"
    assert run(capsys, "--csv", str(path))[0] == 0
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert len(rows) == 12
    assert float(rows[0]["jct_s"]) > float(rows[0]["ttft_s"]) > 0


def test_a_profile_from_a_file_and_a_model_from_a_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    profile = built_in(MODELS["smollm2-135m"], "cpu", model="tiny")
    path = tmp_path / "profile.json"
    path.write_bytes(msgspec.json.encode(profile))
    _, out, _ = run(capsys, "--profile", str(path), "--max-context", "2000")
    assert "tiny on cpu" in out
    config = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
              "vocab_size": 100, "intermediate_size": 128}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert run(capsys, "--model", str(tmp_path))[0] == 0


def test_a_profile_of_another_format_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    profile = built_in(MODELS["smollm2-135m"], "cpu", model="tiny")
    path = tmp_path / "profile.json"
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(profile, format=99)))
    code, out, err = run(capsys, "--profile", str(path))
    assert (code, out) == (2, "")
    assert "format 99" in err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--mode", "3X"], "3X"),
        (["--mode", "9999P9999D"], "at most 9999"),
        (["--caching", "some"], "none, prefill, decode, full"),
        (["--dataset", "/does/not/exist"], "cannot read"),
        (["--synthetic", "turns"], "documents"),
        (["--synthetic", "turns=many"], "turns"),
        (["--synthetic", "turns=0"], "turns"),
        (["--rate", "0"], "--rate"),
        (["--rate", "nan"], "--rate"),
        (["--rate", "1e-300"], "days"),
        (["--think-s", "nan"], "--think-s"),
        (["--tp", "0"], "--tp"),
        (["--tp", "P=3"], "1, 2, 4, 8, 16, 32"),
        (["--tp", "PD=2"], "the mode has no PD"),
        (["--tp", "two"], "P=2,D=1"),
        (["--device", "foo"], "H200, H100, H800, A100, cpu"),
        (["--requests", "99999999999"], "up to 2,000,000"),
        (["--synthetic", "turns=1000000"], "1 to 1,000"),
        (["--synthetic", "turns=2", "--dataset", "x.jsonl"], "there is a --dataset"),
        (["--profile", "x.json", "--device", "H100"], "the --profile says it"),
        (["--set", "mempool.dram_gb=4"], "mempool.dram_gb changes nothing here"),
        (["--json", "--csv", "/dev/full"], "cannot write /dev/full"),
        (["--mode", "900P900D", "--blocks", "200000"], "up to 111,111 for each"),
        (["--tp", "3"], "1, 2, 4, 8, 16, 32"),
        (["--slo-ttft-s", "-1"], "--slo-ttft-s"),
        (["--svg", "/does/not/exist/file"], "--svg"),
        (["--svg", "a.svg", "--json"], "--json"),
        (["--svg", "a.svg", "--csv", "a.svg"], "the CSV file"),
        (["--link", "dram"], "allowed: ipc, nccl, tcp, shm"),
        (["--blocks", "1000000000000"], "up to"),
        (["--requests", "-1"], "--requests"),
        (["--max-context", "10"], "no call fits"),
        (["--model", "no-such-model"], "llama-3.1-8b"),
        (["--model", "llama-3.1-70b", "--device", "A100"], "--tp"),
        (["--profile", "/does/not/exist"], "cannot read"),
        (["--link", "pigeon"], "ipc"),
        (["--blocks", "3"], "too few"),
        (["--copies", "2"], "--copies"),
        (["--set", "scheduler.nothing=1"], "scheduler.nothing"),
        (["--csv", "/does/not/exist/file"], "cannot write"),
    ],
)
def test_a_mistake_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], problem: str
) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert problem in err
    assert err.count("\n") == 1


# ── figures ───────────────────────────────────────────────────────────────────────────────────


def outcome(ttft: float | None, jct: float | None, reply: int = 11) -> Outcome:
    return Outcome(
        session="s",
        prompt_tokens=100,
        reply_tokens=reply,
        sent_at=1.0,
        first_token_at=None if ttft is None else 1.0 + ttft,
        ended_at=None if jct is None else 1.0 + jct,
        cached_tokens=25,
        error=None if jct is not None else "lost",
    )


def result(*outcomes: Outcome) -> Result:
    return Result(
        outcomes=list(outcomes),
        traffic=Traffic({"forward": 2}, {"forward": 2048}, evicted_blocks=3),
        duration_s=10.0,
        busy={"P0": 0.5, "D0": 1.0},
        num_preempted=0,
        num_events=5,
        work=Work([0.001, 0.003], {"Sent": 0.2, "Tokens": 0.3}, {"Sent": 2, "Tokens": 7}),
    )


def test_figures_are_those_of_the_definitions() -> None:
    run = result(outcome(1.0, 2.0), outcome(3.0, 13.0), outcome(None, None))
    summary = summarize(run, Objectives(ttft_s=2.0, tpot_s=0.5))
    assert (summary.requests, summary.failed) == (3, 1)
    assert (summary.ttft_s.mean, summary.jct_s.mean) == (2.0, 7.5)
    assert summary.tpot_s.p50 == pytest.approx((0.1 + 1.0) / 2)
    assert summary.goodput == pytest.approx(1 / 3)
    assert summary.goodput_per_s == pytest.approx(0.1)
    assert summary.requests_per_s == pytest.approx(0.2)
    assert summary.hit_ratio == 0.25
    assert (summary.busy_mean, summary.busy_most) == (0.75, 1.0)
    assert summary.busy_by_role == {"P": 0.5, "D": 1.0}
    assert summary.scheduler_s == pytest.approx(0.504)


def test_a_reply_of_one_token_has_no_time_per_token() -> None:
    assert outcome(1.0, 1.0, reply=1).tpot_s is None
    assert Objectives(tpot_s=0.1).are_met(outcome(1.0, 1.0, reply=1))


def test_nothing_at_all_is_shown_too() -> None:
    console = Console(file=io.StringIO(), width=100)
    empty = result(outcome(None, None))
    show(summarize(empty, Objectives()), empty, Objectives(), console)
    assert "1 failed" in console.file.getvalue()  # type: ignore[attr-defined]
    assert spread([]).mean is None


def test_a_run_over_time() -> None:
    outcomes = [outcome(1.0, 2.0), outcome(11.0, 19.0)]
    outcomes[1].sent_at, outcomes[1].cached_tokens = 9.0, 50  # its TTFT is 3 s
    run = result(*outcomes)
    run.traffic.moved.append((10.9, 3200))  # in the last of 32 intervals of 10 s
    console = Console(file=io.StringIO(), width=100)
    console.print(over_time(run, Objectives(ttft_s=2.0)))
    text = console.file.getvalue()  # type: ignore[attr-defined]

    def row(name: str) -> str:
        (line,) = [line for line in text.splitlines() if line.strip().startswith(name)]
        return line.strip().removeprefix(name)

    assert row("from the cache").split()[-2:] == ["25%", "50%"]
    assert row("goodput").split()[-2:] == ["0%", "100%"]
    assert "10.0 KiB" in row("moved, bytes/s")
    bars = row("TTFT, mean").strip()
    assert (bars[0], bars[25]) == ("▃", "█")


@pytest.mark.parametrize("values", [[0.1, 0.2, 0.4, 8.0], [1.0, 1.0], [0.0, 1e-9], [5.0, 5e5]])
def test_every_value_is_in_one_bin(values: list[float]) -> None:
    lines = histogram(values)
    assert sum(int(line.split()[-1]) for line in lines) == len(values)
