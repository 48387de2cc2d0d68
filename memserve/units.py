"""Numbers as people read them: sizes in MiB and GiB, times with their units."""

from __future__ import annotations


def format_size(size_bytes: float) -> str:
    """`512 B`, `1.5 MiB`, `12.3 GiB`."""
    value, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    digits = 0 if unit == "B" or value >= 100 else 1
    return f"{value:.{digits}f} {unit}"


def format_time(seconds: float) -> str:
    """`0.4 s`, `12 s`, `3 min 20 s`, `1 h 02 min`, `2 d 03 h`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02} h"


def format_count(value: int) -> str:
    """`980`, `12,345`, `1.2 M`: never more than seven characters below 10¹²."""
    if value < 100_000:
        return f"{value:,}"
    for limit, unit in ((1_000_000, "k"), (1_000_000_000, "M"), (1_000_000_000_000, "G")):
        if value < limit:
            scaled = value * 1000 / limit
            return f"{scaled:.0f} {unit}" if scaled >= 99.95 else f"{scaled:.1f} {unit}"
    return f"{value:.1e}"


def format_rate(per_second: float) -> str:
    """Without the unit: `0`, `0.4`, `12.3`, `1,240`."""
    if per_second == 0:
        return "0"
    return f"{per_second:.1f}" if per_second < 99.95 else f"{per_second:,.0f}"


def format_ratio(part: float, whole: float) -> str:
    """In percent; `–` of nothing."""
    return f"{100 * part / whole:.0f}%" if whole else "–"
