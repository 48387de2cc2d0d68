"""The pieces of a live view's frame: header, tables, bars. All pure. Collaborator: `tui.py`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from memserve.messages import PoolStats
from memserve.progress import MARKS
from memserve.status import AuditReport, Costs, InstanceStatus, LinkStatus, Snapshot
from memserve.types import Role
from memserve.units import format_count, format_rate, format_ratio, format_size, format_time

HEAD = "bold cyan"
DIM = "dim"
WIDE = 110
"""Columns of a terminal from which on every column is shown."""

_ACTIVE, _HISTORICAL, _FREE = ("█", "green"), ("▒", "yellow"), ("·", "dim")
_ROLES = {Role.PREFILL: "prefill", Role.DECODE: "decode", Role.COLOCATED: "colocated"}
_DRAM_COLUMNS = ("DRAM", "of", "out", "in")
"""Slots in use and all slots, blocks swapped out and in; shown where an instance has a tier."""
_STALE_S = 5.0
"""Heartbeats are older than this only when something is wrong or the engine is in a long step."""


def header(snapshot: Snapshot, notice: str | None, address: str) -> RenderableType:
    """Who serves what and where, and whether it does."""
    if notice is not None:
        state = Text(notice, "bold red")
    elif snapshot.is_ready:
        state = Text("● ready", "bold green")
    else:
        state = Text("○ not ready", "bold yellow")
    facts = (
        snapshot.mode,
        f"caching {snapshot.caching}",
        f"device {snapshot.device}",
        f"up {format_time(snapshot.uptime_s)}",
    )
    table = Table.grid(expand=True, padding=(0, 1))
    table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    table.add_column(no_wrap=True, justify="right")
    table.add_row(Text.assemble(("MemServe", "bold"), "  ", (snapshot.model, "bold cyan")), state)
    line = Text(no_wrap=True, overflow="ellipsis")
    if address:
        line.append(f"{address}  ")
    return Group(table, line.append(" · ".join(facts), DIM), _cost_line(snapshot.costs))


def _cost_line(costs: Costs) -> Text:
    """Where the scheduler's expectations come from, and how they are corrected by now."""
    line = Text("costs  ", DIM, no_wrap=True, overflow="ellipsis")
    observed = f"device × {costs.device_factor:.2f}, host × {costs.host_factor:.2f} observed  "
    line.append(observed, DIM)
    return line.append(costs.profile, DIM if costs.is_calibrated else "yellow")


def traffic_tables(
    snapshot: Snapshot, previous: Snapshot | None, interval_s: float
) -> list[RenderableType]:
    """Requests and tokens: rates over the interval, and sums since the start."""
    now = snapshot.counters
    before = previous.counters if previous is not None else None

    def rate(counter: str) -> str:
        if before is None:
            return "–"
        new = getattr(now, counter) - getattr(before, counter)
        return f"{format_rate(max(new, 0) / interval_s)}/s"

    requests = _numbers(
        "REQUESTS",
        [
            ("new", rate("submitted")),
            ("running", format_count(now.running)),
            ("waiting", format_count(now.waiting)),
            ("finished", format_count(now.finished)),
            ("cancelled", format_count(now.cancelled)),
            ("failed", format_count(now.failed)),
            ("moved", format_count(now.replaced)),
        ],
    )
    recent = "–"
    if before is not None:
        recent = format_ratio(
            now.cached_tokens - before.cached_tokens, now.prompt_tokens - before.prompt_tokens
        )
    tokens = _numbers(
        "TOKENS",
        [
            ("generated", rate("generated_tokens")),
            ("total", format_count(now.generated_tokens)),
            ("prompt", rate("prompt_tokens")),
            ("total", format_count(now.prompt_tokens)),
            ("cached", format_count(now.cached_tokens)),
            ("hits", format_ratio(now.cached_tokens, now.prompt_tokens)),
            ("hits now", recent),
        ],
    )
    return [requests, tokens]


def instance_table(snapshot: Snapshot, width: int, max_rows: int) -> RenderableType:
    """One row per instance."""
    is_wide = width >= WIDE
    table = _table("INSTANCE", *(["role"] if is_wide else []), "state")
    if is_wide:
        _right(table, "life", "restarts")
    table.add_column("blocks")  # the one column that gives way where the terminal is narrow
    _right(table, *(["active", "historical"] if is_wide else []), "free", "of")
    has_dram = any(i.stats is not None and i.stats.dram_blocks for i in snapshot.instances)
    _right(table, *(_DRAM_COLUMNS if is_wide and has_dram else []))
    _right(table, "queue", "run", "wait", "hits", "beat")
    for instance in snapshot.instances[:max_rows]:
        table.add_row(*_instance_row(instance, is_wide, has_dram=has_dram))
    return _cut(table, len(snapshot.instances), max_rows, "instances")


def link_table(
    snapshot: Snapshot, previous: Snapshot | None, interval_s: float, width: int, max_rows: int
) -> RenderableType:
    """One row per direction between two instances, the busiest first if not all fit."""
    is_wide = width >= WIDE
    table = _table("LINK", "kind")
    _right(table, "transfers", "blocks", "sent", "now")
    _right(table, *(["while sending"] if is_wide else []), "failed")
    links: Sequence[LinkStatus] = snapshot.links
    if len(links) > max_rows:
        links = sorted(links, key=lambda link: link.size_bytes, reverse=True)[:max_rows]
    earlier = {(link.source, link.target): link for link in previous.links} if previous else {}
    for link in links:
        before = earlier.get((link.source, link.target))
        now = "–"
        if previous is not None:
            new_bytes = link.size_bytes - (before.size_bytes if before is not None else 0)
            now = f"{format_size(max(new_bytes, 0) / interval_s)}/s"
        speed = f"{format_size(link.size_bytes / link.seconds)}/s" if link.seconds > 0 else "–"
        table.add_row(
            f"{link.source} → {link.target}",
            link.kind,
            format_count(link.transfers),
            format_count(link.blocks),
            format_size(link.size_bytes),
            now,
            *([speed] if is_wide else []),
            Text(format_count(link.failures), "bold red" if link.failures else ""),
        )
    return _cut(table, len(snapshot.links), max_rows, "links")


def problem_lines(snapshot: Snapshot) -> list[Text]:
    """What instances say of their failure."""
    return [
        Text(f"{instance.id}: {instance.error}", "red", no_wrap=True, overflow="ellipsis")
        for instance in snapshot.instances
        if instance.error
    ]


class BlockBar:
    """An instance's blocks, as wide as its column."""

    def __init__(self, stats: PoolStats) -> None:
        self._stats = stats

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(8, 40).clamp(max_width=options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield block_bar(self._stats, min(options.max_width, 40))


def block_bar(stats: PoolStats, width: int) -> Text:
    """Active, historical and free blocks in proportion; what is there at all gets a cell."""
    counts = (stats.active_blocks, stats.historical_blocks, stats.free_blocks)
    total = sum(counts)
    if total == 0:
        return Text(" " * width)
    cells = [max(round(width * count / total), 1) if count else 0 for count in counts]
    cells[cells.index(max(cells))] += width - sum(cells)
    kinds = (_ACTIVE, _HISTORICAL, _FREE)
    return Text.assemble(
        *((sign * count, style) for (sign, style), count in zip(kinds, cells, strict=True))
    )


def legend() -> Text:
    """What the signs in the bars mean."""
    kinds = ((_ACTIVE, "active"), (_HISTORICAL, "historical"), (_FREE, "free"))
    text = Text("blocks", DIM)
    for (sign, style), name in kinds:
        text.append(f"  {sign} ", style)
        text.append(name, DIM)
    return text


def share_rows(wanted: Sequence[int], room: int) -> list[int]:
    """Rows for each part: at least two each where there is room, then in order of importance."""
    shares = [0] * len(wanted)
    for floor in (2, max(wanted, default=0)):
        for index, count in enumerate(wanted):
            extra = min(count, floor) - shares[index]
            shares[index] += max(min(extra, room - sum(shares)), 0)
    return shares


def audit_lines(reports: Sequence[AuditReport]) -> list[Text]:
    """What every instance says of its pool's accounting."""
    lines: list[Text] = []
    for report in reports:
        name = f"audit of {report.instance}: "
        if not report.problems:
            holders = ", ".join(report.holders) or "nobody"
            lines.append(Text(f"{name}sound; blocks are held by {holders}", "green"))
        lines += [Text(f"{name}{problem}", "bold red") for problem in report.problems]
    return lines


def _instance_row(
    instance: InstanceStatus, is_wide: bool, *, has_dram: bool
) -> list[RenderableType]:
    mark, style = MARKS[instance.state]
    if instance.is_silent:
        mark, style = "◌", "bold yellow"
    row: list[RenderableType] = [Text(instance.id, "bold")]
    if is_wide:
        row.append(_ROLES[instance.role])
    row.append(Text(f"{mark} {instance.word}", style))
    if is_wide:
        restarts = Text(str(instance.restarts), "yellow" if instance.restarts else "")
        row += [str(instance.epoch), restarts]
    stats = instance.stats
    queue = format_count(instance.queued_tokens)
    num_dram = len(_DRAM_COLUMNS) if is_wide and has_dram else 0
    if stats is None:
        blanks = ["–"] * ((4 if is_wide else 2) + num_dram)
        return [*row, Text("–", DIM), *blanks, queue, "–", "–", "–", "–"]
    row.append(BlockBar(stats))
    if is_wide:
        row += [format_count(stats.active_blocks), format_count(stats.historical_blocks)]
    row += [format_count(stats.free_blocks), format_count(stats.total_blocks)]
    dram = (stats.dram_used_blocks, stats.dram_blocks)
    swapped = (stats.swapped_out_blocks, stats.swapped_in_blocks)
    row += [format_count(count) for count in (*dram, *swapped)][:num_dram]
    row.append(queue)
    row += [format_count(stats.running_requests), format_count(stats.waiting_requests)]
    row.append(format_ratio(stats.prefix_hit_tokens, stats.prefix_query_tokens))
    age_s = instance.stats_age_s
    beat = "–" if age_s is None else format_time(age_s)
    row.append(Text(beat, "yellow" if age_s is not None and age_s > _STALE_S else ""))
    return row


def _numbers(name: str, cells: Sequence[tuple[str, str]]) -> Table:
    """Captions over their numbers."""
    table = _table(name)
    _right(table, *(caption for caption, _ in cells))
    table.add_row("", *(value for _, value in cells))
    for column in table.columns[1:]:
        column.min_width = 8
    return table


def _table(name: str, *left: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style=DIM)
    table.add_column(name, header_style=HEAD, no_wrap=True, min_width=8)
    for caption in left:
        table.add_column(caption, no_wrap=True)
    return table


def _right(table: Table, *captions: str) -> None:
    for caption in captions:
        table.add_column(caption, no_wrap=True, justify="right")


def _cut(table: Table, total: int, shown: int, what: str) -> Table:
    if total > shown:
        table.caption = f"… {total - shown} more {what}"
        table.caption_justify = "left"
        table.caption_style = DIM
    return table
