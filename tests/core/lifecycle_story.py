"""A request's lifecycle as a story: what happens to it, and what it asks for then.

A `Story` feeds events by hand and returns what was asked for, one short line per action (notes for
the timeline left out), so that a test reads like the exchange itself.
"""

from __future__ import annotations

from memserve.core.lifecycle import RequestLifecycle
from memserve.core.vocabulary import (
    Action,
    AnyInput,
    ClientCancelled,
    Deliver,
    Ended,
    Fail,
    Fetch,
    InstanceLost,
    InstanceSilent,
    Learned,
    Limits,
    Note,
    Output,
    PlaceAgain,
    Plan,
    RequestSpec,
    Seat,
    Send,
    StopSeen,
)
from memserve.messages import (
    Abort,
    Allocate,
    Allocated,
    AnyCommand,
    Cancel,
    Commit,
    Decode,
    Expired,
    Finished,
    Inserted,
    InsertFailed,
    Prefill,
    Refused,
    Rejected,
    Sent,
    Started,
    TokenOutput,
    Transmit,
    TransmitFailed,
)
from memserve.types import BlockId, Caching, InstanceId, Namespace, RequestId, TransferId

BLOCK_SIZE = 4
BLOCK_BYTES = 100


def line(command: AnyCommand) -> str:
    """A command with what matters of it."""
    match command:
        case Prefill():
            flags = [name for name in ("whole", "hold", "resample") if getattr(command, name)]
            generated = f" ({command.num_generated} generated)" if command.num_generated else ""
            known = f"{command.known_tokens}+" if command.known_tokens else ""
            return f"Prefill {known}{len(command.token_ids)}{generated} {' '.join(flags)}"
        case Decode():
            hold = " hold" if command.hold else ""
            told = f"{command.known_tokens}+{len(command.token_ids)}"
            return f"Decode {told} ({command.num_generated} generated){hold}"
        case Allocate():
            told = f"{command.known_tokens}+{len(command.token_ids)}"
            return f"Allocate {way(command.transfer_id)} {told}"
        case Transmit():
            last = command.first_block + len(command.block_ids)
            history = f" of {len(command.history.token_ids)} tokens" if command.history else ""
            return f"Transmit {way(command.transfer_id)} [{command.first_block}:{last}]{history}"
        case Commit():
            pin = " pin" if command.pin else ""
            return f"Commit {way(command.transfer_id)} {command.size_bytes}{pin}"
        case Cancel():
            return f"Cancel {way(command.transfer_id)}"
        case Abort():
            return "Abort hold" if command.hold else "Abort"
    raise AssertionError(command)


def way(transfer_id: TransferId) -> str:
    return transfer_id.split("/")[1]


def lines(actions: list[Action]) -> list[str]:
    texts = []
    for action in actions:
        match action:
            case Send():
                texts.append(f"{action.instance} {line(action.command)}")
            case Deliver():
                said = ("prompt", "tokens", "final")
                texts.append("deliver " + " ".join(x for x in said if getattr(action.delivery, x)))
            case Learned():
                texts.append(f"{action.instance} has {action.num_tokens}")
            case Fail():
                texts.append(f"fail: {action.error}")
            case PlaceAgain():
                texts.append("place again")
            case Ended():
                texts.append("ended")
            case Note():
                pass
    return texts


class Story:
    """One request of `prompt` tokens; the workers are played by the test."""

    def __init__(
        self,
        caching: Caching = Caching.FULL,
        *,
        prompt: int = 10,
        max_tokens: int = 5,
        resample: bool = False,
        grammar_field: str | None = None,
        max_attempts: int = 3,
    ) -> None:
        spec = RequestSpec(
            id=RequestId("r"),
            prompt_token_ids=list(range(prompt)),
            request=b"",
            max_tokens=max_tokens,
            resample=resample,
            namespace=Namespace(),
            grammar_field=grammar_field,
        )
        self.life = RequestLifecycle(spec, Limits(BLOCK_SIZE, max_attempts, 30.0))
        self.caching = caching
        self.epochs: dict[str, int] = {}

    def step(self, event: AnyInput) -> list[str]:
        actions = self.life.step(event)
        self.life.check_integrity()
        for action in actions:
            if isinstance(action, Send):
                assert action.command.epoch == self.epochs[action.instance]
        return lines(actions)

    def place(
        self,
        first: str,
        decode: str | None = None,
        epoch: int = 1,
        fetch: tuple[str, int] | None = None,
    ) -> list[str]:
        """`fetch`: from which instance, and how many tokens."""
        self.epochs |= {first: epoch} | ({decode: epoch} if decode else {})
        source = None
        if fetch is not None:
            self.epochs.setdefault(fetch[0], epoch)
            seat = Seat(InstanceId(fetch[0]), self.epochs[fetch[0]])
            source = Fetch(seat, fetch[1], deadline_s=0.5)
        plan = Plan(
            first=Seat(InstanceId(first), epoch),
            decode=Seat(InstanceId(decode), epoch) if decode else None,
            first_is_private=not self.caching.prefill_keeps,
            decode_is_private=not self.caching.decode_keeps,
            returns=decode is not None and self.caching.decode_returns,
            fetch=source,
        )
        return lines(self.life.place(plan))

    def started(self, at: str, cached_tokens: int = 0) -> list[str]:
        return self.step(
            Started(
                **self._from(at),
                request_id=self.life.spec.id,
                attempt=self.life.attempt,
                cached_tokens=cached_tokens,
            )
        )

    def output(
        self, at: str, count: int, reason: str | None = None, attempt: int | None = None
    ) -> list[str]:
        token_ids = [100 + len(self.life.generated) + i for i in range(count)]
        output = TokenOutput(self.life.spec.id, attempt or self.life.attempt, token_ids, reason)
        return self.step(Output(InstanceId(at), output))

    def finished(self, at: str, held_tokens: int = 0, attempt: int | None = None) -> list[str]:
        return self.step(
            Finished(
                **self._from(at),
                request_id=self.life.spec.id,
                attempt=attempt or self.life.attempt,
                held_tokens=held_tokens,
            )
        )

    def rejected(self, at: str) -> list[str]:
        return self.step(
            Rejected(
                **self._from(at),
                request_id=self.life.spec.id,
                attempt=self.life.attempt,
                message="too long",
            )
        )

    def allocated(self, at: str, way: str, hit_blocks: int, num_blocks: int) -> list[str]:
        block_ids = [BlockId(50 + i) for i in range(num_blocks)]
        return self.step(
            Allocated(
                **self._from(at),
                transfer_id=self._id(way),
                hit_blocks=hit_blocks,
                block_ids=block_ids,
            )
        )

    def refused(self, at: str, way: str) -> list[str]:
        return self.step(Refused(**self._from(at), transfer_id=self._id(way), reason="no room"))

    def expired(self, at: str, way: str) -> list[str]:
        return self.step(Expired(**self._from(at), transfer_id=self._id(way)))

    def sent(self, at: str, way: str, num_blocks: int, size_bytes: int | None = None) -> list[str]:
        return self.step(
            Sent(
                **self._from(at),
                transfer_id=self._id(way),
                num_blocks=num_blocks,
                size_bytes=num_blocks * BLOCK_BYTES if size_bytes is None else size_bytes,
                seconds=0.001,
            )
        )

    def transmit_failed(self, at: str, way: str) -> list[str]:
        return self.step(
            TransmitFailed(**self._from(at), transfer_id=self._id(way), reason="broken")
        )

    def inserted(self, at: str, way: str, num_tokens: int) -> list[str]:
        return self.step(
            Inserted(**self._from(at), transfer_id=self._id(way), num_tokens=num_tokens)
        )

    def insert_failed(self, at: str, way: str) -> list[str]:
        return self.step(InsertFailed(**self._from(at), transfer_id=self._id(way), reason="bytes"))

    def lost(self, at: str, epoch: int = 1) -> list[str]:
        return self.step(InstanceLost(Seat(InstanceId(at), epoch)))

    def silent(self, at: str) -> list[str]:
        return self.step(InstanceSilent(Seat(InstanceId(at), self.epochs[at])))

    def cancel(self) -> list[str]:
        return self.step(ClientCancelled())

    def stop(self) -> list[str]:
        return self.step(StopSeen())

    def _from(self, at: str) -> dict[str, object]:
        return {"instance": InstanceId(at), "epoch": self.epochs[at]}

    def _id(self, way: str) -> TransferId:
        return TransferId(f"r/{way}/{self.life.attempt}")

    # ── common beginnings ─────────────────────────────────────────────────────────────────────

    def until_fetching(self, decode: str | None = "D0", source: str = "P1") -> Story:
        """P has reserved two blocks, of which it holds one, and the source was told to send."""
        self.place("P0", decode, fetch=(source, 8))
        self.allocated("P0", "fetch", 1, 1)
        return self

    def until_ordered(self) -> Story:
        """P computes the prompt; D has reserved its two full blocks."""
        self.place("P0", "D0")
        self.started("P0")
        self.allocated("D0", "forward", 0, 2)
        return self

    def until_handoff(self) -> Story:
        """P has given the first token, and is sending."""
        self.until_ordered()
        self.output("P0", 1, "length")
        self.finished("P0", held_tokens=10)
        return self

    def until_decode(self) -> Story:
        """D has the KV and two tokens are out."""
        self.until_handoff()
        self.sent("P0", "forward", 2)
        self.inserted("D0", "forward", 8)
        self.started("D0", 8)
        self.output("D0", 1)
        return self

    def until_return(self) -> Story:
        """All 5 tokens are out, and P is asked for room for the third block."""
        self.until_decode()
        self.output("D0", 3, "length")
        self.finished("D0", held_tokens=14)
        return self
