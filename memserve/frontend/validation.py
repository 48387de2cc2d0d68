"""One sentence about what is wrong with a request's body, from pydantic's list of faults.

A field that may have several forms gives a list of faults for each form; those of the form that
fits best are told, and only the first field at fault.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

_MAX_SHOWN = 60
"""Characters of a bad value that are repeated to the client."""


def describe(error: ValidationError, body: object) -> tuple[str, str | None]:
    """(message, field): the field is named, the value shown, and what is allowed said."""
    faults = error.errors(include_url=False)
    forms: dict[tuple[str | int, ...], list[Any]] = {}
    for fault in faults:
        forms.setdefault(_form(fault["loc"], body), []).append(fault)
    fit = min(map(_misfit, forms.values()))
    best = [fault for form in forms.values() if _misfit(form) == fit for fault in form]
    field = _field(best[0]["loc"], body, best[0]["type"])
    same = [fault for fault in best if _field(fault["loc"], body, fault["type"]) == field]
    needs = list(dict.fromkeys(_need(fault["msg"]) for fault in same))
    if best[0]["type"] == "missing":
        return f"{field}: is missing", field
    shown = repr(best[0]["input"])
    shown = shown if len(shown) <= _MAX_SHOWN else shown[:_MAX_SHOWN] + "…"
    return f"{field or 'body'}: {shown} is not allowed; {' or '.join(needs)}", field or None


def _misfit(faults: list[Any]) -> tuple[bool, int]:
    """How far the client is from this form. A wrong constant (a message's role): meant another."""
    return any(fault["type"] == "literal_error" for fault in faults), len(faults)


def _form(loc: tuple[str | int, ...], body: object) -> tuple[str | int, ...]:
    """The path down to the first part that is a name of pydantic's and not of the body."""
    for length, part in enumerate(loc, start=1):
        try:
            body = body[part]  # type: ignore[index]
        except (KeyError, IndexError, TypeError):
            return loc[:length]
    return loc


def _field(loc: tuple[str | int, ...], body: object, kind: str) -> str:
    """`messages[0].content`, without the names of forms that pydantic puts in between."""
    text = ""
    for position, part in enumerate(loc):
        try:
            body = body[part]  # type: ignore[index]
        except (KeyError, IndexError, TypeError):
            if kind != "missing" or position != len(loc) - 1:
                continue
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")


def _need(message: str) -> str:
    """Pydantic's `Input should be …`, as the end of our sentence."""
    need = message.removeprefix("Value error, ").removeprefix("Input should be ")
    return need.replace("valid dictionary", "JSON object").replace("iterable", "a list")
