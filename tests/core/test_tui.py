"""The live view and the start-up lines, read as the text they put on a terminal."""

from __future__ import annotations

import asyncio
import io
import logging
import re
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from memserve import tui, tui_text, units
from memserve.messages import PoolStats
from memserve.progress import Progress, curl_line
from memserve.status import Costs, Counters, InstanceStatus, LinkStatus, Snapshot
from memserve.types import InstanceId, InstanceState, Role

replace = msgspec.structs.replace


def _stats(active: int = 20, historical: int = 30, free: int = 50) -> PoolStats:
    return PoolStats(
        total_blocks=active + historical + free,
        free_blocks=free,
        historical_blocks=historical,
        active_blocks=active,
        reserved_blocks=0,
        quarantined_blocks=0,
        pinned_requests=0,
        running_requests=3,
        waiting_requests=2,
        prefix_hit_tokens=600,
        prefix_query_tokens=1000,
    )


def _instance(name: str, stats: PoolStats | None = None) -> InstanceStatus:
    return InstanceStatus(
        id=InstanceId(name),
        role=Role(name.rstrip("0123456789")),
        state=InstanceState.READY,
        epoch=1,
        pid=1,
        restarts=0,
        stats=stats or _stats(),
        stats_age_s=0.4,
        queued_tokens=1234,
        running_requests=3,
    )


def _link(source: str, target: str, size_bytes: int = 3 << 30) -> LinkStatus:
    return LinkStatus(
        source=InstanceId(source),
        target=InstanceId(target),
        kind="shm",
        transfers=12,
        failures=0,
        blocks=345,
        size_bytes=size_bytes,
        seconds=2.0,
    )


def _snapshot(instances: int = 2) -> Snapshot:
    names = ["P0", *(f"D{number}" for number in range(instances - 1))]
    return Snapshot(
        model="smollm2-135m-instruct",
        mode=f"1P{instances - 1}D-CC",
        caching="full",
        device="cpu",
        is_ready=True,
        uptime_s=100.0,
        instances=[_instance(name) for name in names],
        links=[_link("P0", name) for name in names[1:]],
        counters=Counters(100, 4, 1, 90, 2, 3, 5, 10_000, 6_000, 2_000),
        costs=Costs("calibrated at noon for m, H200", True, "built in", 0.021, 1.125, 0.9),
    )


def _later(snapshot: Snapshot, seconds: float = 2.0) -> Snapshot:
    counters = replace(
        snapshot.counters,
        submitted=snapshot.counters.submitted + 10,
        prompt_tokens=snapshot.counters.prompt_tokens + 1000,
        cached_tokens=snapshot.counters.cached_tokens + 900,
        generated_tokens=snapshot.counters.generated_tokens + 400,
    )
    links = [replace(link, size_bytes=link.size_bytes + (1 << 30)) for link in snapshot.links]
    return replace(snapshot, uptime_s=snapshot.uptime_s + seconds, counters=counters, links=links)


def _console(width: int = 80, height: int = 24) -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    console = Console(
        file=text,
        width=width,
        height=height,
        force_terminal=True,
        color_system=None,
        _environ={},
    )
    return console, text


def _text(renderable: object, width: int = 80) -> str:
    console, text = _console(width)
    console.print(renderable)
    return text.getvalue()


def _row(text: str, start: str) -> list[str]:
    [line] = [line for line in text.splitlines() if line.startswith(start)]
    return line.split()


# ── frames ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("width", [40, 80, 140])
def test_a_frame_fits_its_width(width: int) -> None:
    first = _snapshot()
    text = _text(tui.render(first, None, 0.0, width, events=["12:00:00  D0 lost"]), width)
    assert max(map(len, text.splitlines())) <= width


@pytest.mark.parametrize("width", [80, 140])
def test_nothing_is_cut_off_at_common_widths(width: int) -> None:
    first = _snapshot()
    frame = tui.render(
        _later(first), first, 2.0, width, address="http://127.0.0.1:8000", hint="q quit"
    )
    text = _text(frame, width)
    assert "…" not in text
    assert "http://127.0.0.1:8000  1P1D-CC" in text
    costs = "costs  device × 1.12, host × 0.90 observed  calibrated at noon for m, H200"
    for words in ("smollm2-135m-instruct", "1P1D-CC · caching full · device cpu", "● ready", costs):
        assert words in text
    assert "█ active  ▒ historical  · free" in text
    assert text.rstrip().endswith("q quit")


def test_rates_are_those_of_the_interval() -> None:
    first = _snapshot()
    text = _text(tui.render(_later(first), first, 2.0, 140), 140)
    lines = text.splitlines()
    starts = [line[:8] for line in lines]
    requests, tokens = lines[starts.index("REQUESTS") + 1], lines[starts.index("TOKENS  ") + 1]
    assert requests.split() == ["5.0/s", "4", "1", "90", "2", "3", "5"]
    assert tokens.split() == ["200/s", "2,400", "500/s", "11,000", "6,900", "63%", "90%"]
    link = " ".join(_row(text, "P0 → D0"))
    assert link == "P0 → D0 shm 12 345 4.0 GiB 512 MiB/s 2.0 GiB/s 0"


def test_the_first_frame_has_no_rates() -> None:
    text = _text(tui.render(_snapshot(), None, 0.0, 80))
    assert "/s" not in text


def test_an_instance_row() -> None:
    narrow = _row(_text(tui.render(_snapshot(), None, 0.0, 80)), "P0  ")
    bar = narrow[3]
    assert set(bar) == {"█", "▒", "·"}
    assert narrow[:3] == ["P0", "●", "ready"]
    assert narrow[4:] == ["50", "100", "1,234", "3", "2", "60%", "0.4", "s"]
    wide = _row(_text(tui.render(_snapshot(), None, 0.0, 140), 140), "P0  ")
    assert wide[:6] == ["P0", "prefill", "●", "ready", "1", "0"]
    assert wide[7:11] == ["20", "30", "50", "100"]


def test_an_instance_that_gives_no_sign() -> None:
    first = _snapshot()
    silent = replace(first, instances=[replace(first.instances[0], is_silent=True)])
    row = _row(_text(tui.render(silent, None, 0.0, 80)), "P0  ")
    assert row[:3] == ["P0", "◌", "silent"]


def test_a_dram_tier_has_its_columns_where_there_is_one() -> None:
    dram = {"dram_blocks": 600, "dram_used_blocks": 450}
    swapped = {"swapped_out_blocks": 777, "swapped_in_blocks": 88}
    with_tier = _instance("P0", replace(_stats(), **dram, **swapped))
    failed = replace(_instance("D0"), stats=None)
    first = replace(_snapshot(), instances=[with_tier, failed])
    wide = _text(tui.render(first, None, 0.0, 140), 140)
    assert _row(wide, "INSTANCE")[9:13] == ["of", "DRAM", "of", "out"]
    assert _row(wide, "P0  ")[10:16] == ["100", "450", "600", "777", "88", "1,234"]
    assert len(_row(wide, "D0  ")) == len(_row(wide, "P0  ")) - 1, "its heartbeat has no unit"
    assert "DRAM" not in _text(tui.render(first, None, 0.0, 80))
    assert "DRAM" not in _text(tui.render(_snapshot(), None, 0.0, 140), 140)


def test_an_instance_that_failed() -> None:
    first = _snapshot()
    lost = replace(
        first.instances[1], state=InstanceState.FAILED, stats=None, error="killed by SIGKILL"
    )
    text = _text(tui.render(replace(first, instances=[first.instances[0], lost]), None, 0.0, 80))
    assert _row(text, "D0  ")[:3] == ["D0", "✕", "failed"]
    assert "D0: killed by SIGKILL" in text


@given(st.tuples(*[st.integers(0, 100_000)] * 3), st.integers(8, 40))
def test_a_bar_is_as_wide_as_asked_and_shows_all_there_is(
    counts: tuple[int, int, int], width: int
) -> None:
    bar = tui_text.block_bar(_stats(*counts), width).plain
    assert len(bar) == width
    if any(counts):
        shown = [bar.count(sign) for sign in "█▒·"]
        assert [cells > 0 for cells in shown] == [count > 0 for count in counts]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=4), st.integers(-5, 80))
def test_rows_are_shared_without_waste(wanted: list[int], room: int) -> None:
    shares = tui_text.share_rows(wanted, room)
    assert all(0 <= share <= want for share, want in zip(shares, wanted, strict=True))
    assert sum(shares) == min(max(room, 0), sum(wanted))


@pytest.mark.parametrize("height", [24, 30, 50])
@pytest.mark.parametrize("instances", [2, 5, 20])
def test_a_frame_fits_its_height(instances: int, height: int) -> None:
    events = [f"12:00:{second:02}  something" for second in range(40)]
    frame = tui.render(
        _snapshot(instances), None, 0.0, 80, height=height, events=events, hint="q quit"
    )
    lines = _text(frame).splitlines()
    assert len(lines) <= height
    assert lines[-1].endswith("q quit")
    assert f"{events[-1]}" in "\n".join(lines)
    if instances == 20 and height < 50:
        assert any(line.strip().endswith("more instances") for line in lines)
        assert any(line.strip().endswith("more links") for line in lines)


# ── what changed ──────────────────────────────────────────────────────────────────────────────


def test_changes() -> None:
    first = _snapshot()
    p0, d0 = first.instances
    lost = replace(d0, state=InstanceState.LOST, error="no heartbeat")
    reborn = replace(d0, epoch=2)
    assert tui.changes(None, first) == []
    assert tui.changes(first, _later(first)) == []
    assert tui.changes(first, replace(first, instances=[p0, lost], is_ready=False)) == [
        "D0 ready → lost: no heartbeat",
        "the cluster is not ready",
    ]
    assert tui.changes(first, replace(first, instances=[p0, reborn])) == [
        "D0 ready → ready, life 2"
    ]
    silent = replace(d0, is_silent=True)
    assert tui.changes(first, replace(first, instances=[p0, silent])) == ["D0 ready → silent"]
    assert tui.changes(first, replace(first, instances=[d0])) == ["P0 left"]
    joined = _instance("D1")
    assert tui.changes(first, replace(first, instances=[p0, d0, joined])) == ["D1 joined: ready"]
    failing = [replace(link, failures=2) for link in first.links]
    assert tui.changes(first, replace(first, links=failing)) == ["P0 → D0: 2 transfers failed"]
    assert tui.changes(first, replace(first, uptime_s=1.0)) == ["the server was started again"]


class Clocks:
    """A clock that moves when told."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def clock(self) -> float:
        return self.now_s

    def wall_time(self) -> str:
        return f"12:00:{int(self.now_s):02}"


def test_a_server_that_goes_away_and_comes_back() -> None:
    clocks = Clocks()
    view = tui.View("q quit", clock=clocks.clock, wall_time=clocks.wall_time)
    view.missed("no server answers at http://x: Connection refused")
    assert "unreachable since 12:00:00" in _text(view.render(80))
    first = _snapshot()
    view.saw(first)
    assert "unreachable" not in _text(view.render(80)).splitlines()[0]
    view.saw(_later(first))
    assert "5.0/s" in _text(view.render(80))
    clocks.now_s = 10.0
    view.missed("no answer")
    clocks.now_s = 22.0
    view.missed("no answer")
    text = _text(view.render(80))
    assert "unreachable since 12:00:10 (12 s)" in text
    assert "5.0/s" not in text
    assert "P0" in text
    assert text.count("no answer") == 1
    view.saw(_later(_later(first)))
    text = _text(view.render(80))
    assert "● ready" in text
    assert "12:00:22  reachable again" in text


def test_a_restarted_server_has_no_rates() -> None:
    view = tui.View("")
    view.saw(_snapshot())
    view.saw(replace(_snapshot(), uptime_s=0.5))
    text = _text(view.render(80))
    assert "/s" not in text
    assert "started again" in text


# ── inside the event loop ─────────────────────────────────────────────────────────────────────


async def test_live_view_draws_until_stopped_and_gives_the_terminal_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    console, text = _console()
    stop = asyncio.Event()
    looks = 0
    err = io.StringIO()
    monkeypatch.setattr(sys, "stderr", err)
    handler = logging.StreamHandler(err)
    root = logging.getLogger()
    root.addHandler(handler)

    def get_snapshot() -> Snapshot:
        nonlocal looks
        looks += 1
        if looks == 2:
            logging.getLogger("memserve.test").warning("D0 is slow")
            assert err.getvalue() == ""
        if looks == 4:
            stop.set()
        return _later(_snapshot(), seconds=float(looks))

    try:
        async with asyncio.timeout(30):
            await tui.live_view(get_snapshot, stop, console=console, interval_s=0.001)
        assert handler in root.handlers
    finally:
        root.removeHandler(handler)
    assert looks == 4
    shown = text.getvalue()
    assert "warning: D0 is slow" in shown
    assert shown.count("\x1b[?1049h") == shown.count("\x1b[?1049l") == 1
    assert shown.rindex("\x1b[?25h") > shown.index("\x1b[?25l")
    assert err.getvalue() == "D0 is slow\n"


async def test_live_view_gives_the_terminal_back_after_a_fault() -> None:
    console, text = _console()

    def get_snapshot() -> Snapshot:
        raise RuntimeError("fault")

    with pytest.raises(RuntimeError, match="fault"):
        await tui.live_view(get_snapshot, asyncio.Event(), console=console)
    assert text.getvalue().count("\x1b[?1049l") == 1


# ── start-up lines ────────────────────────────────────────────────────────────────────────────


def _progress(is_terminal: bool) -> tuple[Progress, io.StringIO, io.StringIO]:
    out, err = io.StringIO(), io.StringIO()
    consoles = [
        Console(file=file, force_terminal=is_terminal, width=60, color_system=None, _environ={})
        for file in (out, err)
    ]
    return Progress(*consoles), out, err


def test_start_up_without_a_terminal() -> None:
    progress, out, err = _progress(is_terminal=False)
    p0 = InstanceId("P0")
    progress.note("converting the model")
    progress.instance(p0, "loading", InstanceState.STARTING)
    progress.instance(p0, "loading", InstanceState.STARTING)
    progress.instance(p0, "ready in 3.4 s", InstanceState.READY)
    progress.ready("http://127.0.0.1:8000", "some-model")
    url = "http://127.0.0.1:8000"
    assert out.getvalue().splitlines() == [
        "converting the model",
        "P0  loading",
        "P0  ready in 3.4 s",
        "",
        f"MemServe serves some-model at {url}",
        "",
        curl_line(url, "some-model"),
        "",
    ]
    assert err.getvalue() == ""


def test_start_up_on_a_terminal_updates_in_place() -> None:
    progress, out, _ = _progress(is_terminal=True)
    progress.instance(InstanceId("P0"), "loading", InstanceState.STARTING)
    progress.instance(InstanceId("D0"), "loading", InstanceState.STARTING)
    progress.instance(InstanceId("P0"), "ready in 3.4 s", InstanceState.READY)
    before = out.getvalue()
    assert "\x1b[1A" in before  # went up to draw over the lines
    assert re.search(r"● +P0 +ready in 3.4 s\s+○ +D0 +loading", before)
    progress.close()
    progress.close()
    assert out.getvalue().endswith("\x1b[?25h")


def test_a_failed_start() -> None:
    progress, out, err = _progress(is_terminal=True)
    progress.instance(InstanceId("P0"), "loading", InstanceState.STARTING)
    progress.failed("port 8000 is in use " + "x" * 80)
    assert out.getvalue().endswith("\x1b[?25h")
    assert err.getvalue() == "memserve: error: port 8000 is in use " + "x" * 80 + "\n"


def test_the_curl_line_is_one_a_shell_takes() -> None:
    line = curl_line("http://h:1", "it's", has_api_key=True)
    assert "\n" not in line
    assert line.endswith('-H "Authorization: Bearer $MEMSERVE_SERVER_API_KEY"')
    assert "Authorization" not in curl_line("http://h:1", "it's")


# ── units ─────────────────────────────────────────────────────────────────────────────────────


def test_units() -> None:
    assert [units.format_size(n) for n in (0, 1023, 1536, 5 << 20, 300 << 20, 3 << 30)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 MiB",
        "300 MiB",
        "3.0 GiB",
    ]
    assert units.format_size(5 << 50) == "5120 TiB"
    assert [units.format_time(s) for s in (0.04, 9.94, 9.96, 59.6, 200, 3725, 100_000)] == [
        "0.0 s",
        "9.9 s",
        "10 s",
        "1 min 00 s",
        "3 min 20 s",
        "1 h 02 min",
        "1 d 03 h",
    ]
    assert [units.format_count(n) for n in (0, 99_999, 100_000, 1_234_567, 10**10, 10**13)] == [
        "0",
        "99,999",
        "100 k",
        "1.2 M",
        "10.0 G",
        "1.0e+13",
    ]
    assert [units.format_rate(r) for r in (0, 0.04, 12.34, 99.96, 12_345.6)] == [
        "0",
        "0.0",
        "12.3",
        "100",
        "12,346",
    ]
    assert units.format_ratio(1, 3) == "33%"
    assert units.format_ratio(0, 0) == "–"
