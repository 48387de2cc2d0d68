"""Files of traces and conversations → calls. What a file is, its first record says.

| data set | records | what of it is used |
|---|---|---|
| Mooncake | JSON lines: `timestamp` (ms), `input_length`, `output_length`, `hash_ids` | all |
| Azure | CSV: TIMESTAMP, ContextTokens, GeneratedTokens | all; prompts share nothing |
| ShareGPT | JSON lines: `conversations` of `from`, `value` | text, turn by turn |
| ShareGPT, lengths | JSON lines: `s`, `t`: pairs of user and reply tokens | all |
| LooGLE | JSON lines: `document`, `questions` of `q`, `a` | each question is a call |
| ReAct | JSON lines: `type` prefix with `text`; others with `question`, `steps` | a call a step |
| MemServe | JSON lines: see `OwnCall` | all |

Any of them may be gzipped (`.gz`). Text is cut into tokens by a simple rule, so that no model's
tokenizer is needed: on English text it makes within 3% as many as SmolLM2's. Replies are the
recorded ones; the next prompt of the session begins with them.
"""

from __future__ import annotations

import csv
import datetime
import gzip
import itertools
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from memserve.errors import ConfigError
from memserve.simulator.workload import Call, Literal, Piece, key_of, literal

_FLAG = "--dataset"
_MOONCAKE_BLOCK = 512
_TEMPLATE_TOKENS = 8
"""What a chat template adds to a turn."""
_WORD = re.compile(r" ?[^\W\d]{1,8}|\d|[^\w\s]|\s")

_Row: TypeAlias = dict[str, Any]


class OwnCall(msgspec.Struct, forbid_unknown_fields=True):
    """A record of MemServe's own format.

    `prompt` is a list of token ids and of pieces `[name, tokens]`: calls that name the same piece
    share its tokens. With `continues` it comes after the prompt and the reply of the session's call
    before. Either all records have `arrival_s`, or none.
    """

    session: str | int
    prompt: list[int | tuple[str, int]]
    output_tokens: int
    arrival_s: float | None = None
    continues: bool = False


def read(path: Path) -> list[Call]:
    """All calls of a file. Raises: ConfigError if it cannot be read, or is of no known kind."""
    try:
        calls = list(_calls(path))
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        what = getattr(error, "strerror", None) or error
        raise ConfigError(_FLAG, f"cannot read {path}: {what}") from error
    if not calls:
        raise ConfigError(_FLAG, f"{path} has no call in it")
    for call in calls:
        if call.reply.length < 1 or call.prompt_tokens < 1:
            raise ConfigError(_FLAG, f"{path}: a call of session {call.session} has no tokens")
        if (least := min(piece.length for piece in call.prompt)) < 0:
            what = f"a prompt of session {call.session} has a piece of {least} tokens"
            raise ConfigError(_FLAG, f"{path}: {what}")
    if len({call.arrival_s is None for call in calls}) > 1:
        raise ConfigError(_FLAG, f"{path}: some calls say when they arrive, and some do not")
    return calls


def _calls(path: Path) -> Iterator[Call]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        first = next((line for line in lines if line.strip()), "")
        if first.startswith("TIMESTAMP,"):
            yield from _azure(csv.DictReader(itertools.chain([first], lines)), path)
        elif first:
            yield from _json_calls(first, lines, path)


def _json_calls(first: str, lines: Iterable[str], path: Path) -> Iterator[Call]:
    row = _decode(first, path, 1)
    reader = next((reader for keys, reader in _READERS.items() if keys <= row.keys()), None)
    if reader is None:
        raise ConfigError(
            _FLAG,
            f"{path}: a record with {', '.join(sorted(row)) or 'nothing'} is of no known kind",
            "Mooncake, Azure, ShareGPT, LooGLE, ReAct or MemServe's own format",
        )
    rest = (_decode(line, path, n) for n, line in enumerate(lines, 2) if line.strip())
    count = 0
    try:
        for call in reader(itertools.chain([row], rest)):
            yield call
            count += 1
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(_FLAG, f"{path}: the record after {count} calls: {what}") from error


def _decode(line: str, path: Path, number: int) -> _Row:
    try:
        row = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise ConfigError(_FLAG, f"{path}, line {number}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ConfigError(_FLAG, f"{path}, line {number}: a record is a JSON object")
    return row


# ── traces ────────────────────────────────────────────────────────────────────────────────────


def _mooncake(rows: Iterable[_Row]) -> Iterator[Call]:
    for number, row in enumerate(rows):
        left = int(row["input_length"])
        prompt = []
        for block in row["hash_ids"]:
            prompt.append(Piece(key_of("mooncake", block), min(left, _MOONCAKE_BLOCK)))
            left -= _MOONCAKE_BLOCK
            if left <= 0:
                break
        if left > 0:
            raise ValueError(f"{row['input_length']} tokens in {len(row['hash_ids'])} blocks")
        reply = Piece(key_of("mooncake reply", number), max(1, int(row["output_length"])))
        yield Call(f"m{number}", tuple(prompt), reply, float(row["timestamp"]) / 1000)


def _azure(rows: Iterable[Mapping[str, str]], path: Path) -> Iterator[Call]:
    begin: datetime.datetime | None = None
    for number, row in enumerate(rows):
        try:
            at = datetime.datetime.fromisoformat(row["TIMESTAMP"])
            tokens, generated = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            begin = begin or at
            arrival_s = (at - begin).total_seconds()
        except (KeyError, TypeError, ValueError) as error:
            what = f"no {error}" if isinstance(error, KeyError) else error
            raise ConfigError(_FLAG, f"{path}, line {number + 2}: {what}") from error
        yield Call(
            f"a{number}",
            (Piece(key_of("azure", number), max(1, tokens)),),
            Piece(key_of("azure reply", number), max(1, generated)),
            arrival_s,
        )


# ── conversations ─────────────────────────────────────────────────────────────────────────────


def _sharegpt_lengths(rows: Iterable[_Row]) -> Iterator[Call]:
    system = Piece(key_of("system"), 20)
    for row in rows:
        session = f"s{row['s']}"
        turns = [
            (
                Piece(key_of(session, turn), user + _TEMPLATE_TOKENS),
                Piece(key_of(session, turn, "reply"), max(1, reply)),
            )
            for turn, (user, reply) in enumerate(row["t"])
        ]
        yield from _conversation(session, (system,), turns)


def _sharegpt(rows: Iterable[_Row]) -> Iterator[Call]:
    system = Piece(key_of("system"), 20)
    for row in rows:
        session = str(row["id"])
        says = row["conversations"]
        turns = [
            (
                tokenize(f"{user['value']}\n"),
                Piece(key_of(session, turn), max(1, len(_WORD.findall(reply["value"])))),
            )
            for turn, (user, reply) in enumerate(zip(says[::2], says[1::2], strict=False))
        ]
        yield from _conversation(session, (system,), turns)


def _react(rows: Iterable[_Row]) -> Iterator[Call]:
    prefixes: dict[str, Literal] = {}
    for row in rows:
        if row["type"] == "prefix":
            prefixes[row["prefix_id"]] = tokenize(row["text"])
            continue
        session = str(row["id"])
        text = f"{row['question']}\n"
        turns = []
        for number, step in enumerate(row["steps"], 1):
            said = f" {step['thought']}\nAction {number}: {step['action']}"
            reply = Piece(key_of(session, number), max(1, len(_WORD.findall(said))))
            turns.append((tokenize(f"{text}Thought {number}:"), reply))
            text = f"\nObservation {number}: {step['observation']}\n"
        yield from _conversation(session, (prefixes[row["prefix_id"]],), turns)


def _conversation(
    session: str, head: tuple[Piece | Literal, ...], turns: Iterable[tuple[Piece | Literal, Piece]]
) -> Iterator[Call]:
    """Each prompt is everything that was said before, and the user's next turn."""
    prompt = head
    for user, reply in turns:
        prompt = (*prompt, user)
        yield Call(session, prompt, reply)
        prompt = (*prompt, reply)


def _loogle(rows: Iterable[_Row]) -> Iterator[Call]:
    head = tokenize("Please answer the question based on the long texts below. \n")
    for row in rows:
        document = tokenize(row["document"])
        for number, question in enumerate(row["questions"]):
            session = f"{row['doc_id']}/{number}"
            asked = tokenize(f"\nQuestion: {question['q']}\nAnswer: ")
            reply = Piece(key_of(session), max(1, len(_WORD.findall(question["a"]))))
            yield Call(session, (head, document, asked), reply)


def tokenize(text: str) -> Literal:
    """Words, in pieces of at most 8 letters, digits and signs; equal words are equal tokens."""
    return literal(1000 + zlib.crc32(word.encode()) % 32768 for word in _WORD.findall(text))


# ── MemServe's own ────────────────────────────────────────────────────────────────────────────


def _own(rows: Iterable[_Row]) -> Iterator[Call]:
    before: dict[str, tuple[Piece | Literal, ...]] = {}
    for number, row in enumerate(rows):
        own = msgspec.convert(row, OwnCall)
        session = str(own.session)
        prompt = _own_prompt(own)
        if own.continues:
            prompt = before.get(session, ()) + prompt
        reply = Piece(key_of("own", session, number), own.output_tokens)
        before[session] = (*prompt, reply)
        yield Call(session, prompt, reply, own.arrival_s)


def _own_prompt(own: OwnCall) -> tuple[Piece | Literal, ...]:
    parts: list[Piece | Literal] = []
    for is_token, items in itertools.groupby(own.prompt, lambda item: isinstance(item, int)):
        if is_token:
            parts.append(literal(item for item in items if isinstance(item, int)))
        else:
            parts += [Piece(key_of("own", i[0]), i[1]) for i in items if not isinstance(i, int)]
    return tuple(parts)


_READERS: dict[frozenset[str], Callable[[Iterable[_Row]], Iterator[Call]]] = {
    frozenset({"hash_ids", "input_length"}): _mooncake,
    frozenset({"s", "t"}): _sharegpt_lengths,
    frozenset({"conversations"}): _sharegpt,
    frozenset({"document", "questions"}): _loogle,
    frozenset({"type", "prefix_id"}): _react,
    frozenset({"prompt", "output_tokens"}): _own,
}
"""The fields that a record of each kind has at least."""
