"""The lifecycle by example: the plain courses of a request, and each failure that it answers.

A `Story` feeds events by hand and returns what was asked for, one short line per action (notes for
the timeline left out), so that a test reads like the exchange itself.
"""

from __future__ import annotations

import pytest

from memserve.core.lifecycle import Phase, RequestLifecycle
from memserve.core.vocabulary import (
    Action,
    AnyInput,
    ClientCancelled,
    Deliver,
    Ended,
    Fail,
    Fetch,
    InstanceLost,
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
                texts.append(f"fail: {action.message}")
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
        max_attempts: int = 3,
    ) -> None:
        spec = RequestSpec(
            id=RequestId("r"),
            prompt_token_ids=list(range(prompt)),
            request=b"",
            max_tokens=max_tokens,
            resample=resample,
            namespace=Namespace(),
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


# ── plain courses ─────────────────────────────────────────────────────────────────────────────


def test_full_caching_gives_the_generated_kv_back() -> None:
    story = Story(Caching.FULL)
    assert story.place("P0", "D0") == ["P0 Prefill 10 hold"]
    assert story.started("P0") == ["D0 Allocate forward 0+10"]
    assert story.allocated("D0", "forward", 0, 2) == ["P0 Transmit forward [0:2]"]
    assert story.output("P0", 1, "length") == ["deliver prompt tokens", "P0 has 10"]
    assert story.finished("P0", held_tokens=10) == []
    assert story.sent("P0", "forward", 2) == [
        "D0 Commit forward 200 pin",
        "D0 Decode 10+1 (1 generated) hold",
    ]
    assert story.inserted("D0", "forward", 8) == ["D0 has 8"]
    assert story.started("D0", 8) == []
    assert story.output("D0", 1) == ["deliver tokens"]
    assert story.output("D0", 3, "length") == ["deliver tokens final"]
    # 15 tokens, of which the last has no KV: three full blocks.
    assert story.finished("D0", held_tokens=14) == ["D0 has 14", "P0 Allocate back 10+2"]
    assert story.allocated("P0", "back", 2, 1) == ["D0 Transmit back [2:3]"]
    assert story.sent("D0", "back", 1) == ["P0 Commit back 100"]
    assert story.inserted("P0", "back", 12) == ["P0 has 12", "P0 Abort", "D0 Abort", "ended"]


def test_decode_caching_keeps_the_kv_on_both_and_returns_nothing() -> None:
    story = Story(Caching.DECODE)
    assert story.place("P0", "D0") == ["P0 Prefill 10 hold"]
    assert story.started("P0") == ["D0 Allocate forward 0+10"]
    assert story.allocated("D0", "forward", 1, 1) == ["P0 Transmit forward [1:2]"]
    assert story.output("P0", 1, "length") == ["deliver prompt tokens", "P0 has 10"]
    assert story.sent("P0", "forward", 1) == [
        "D0 Commit forward 100 pin",
        "D0 Decode 10+1 (1 generated)",
    ]
    assert story.inserted("D0", "forward", 8) == ["D0 has 8"]
    assert story.output("D0", 4, "length") == ["deliver tokens final", "D0 has 14"]
    assert story.finished("D0") == ["P0 Abort", "D0 Abort", "ended"]


@pytest.mark.parametrize(
    ("caching", "learned"), [(Caching.PREFILL, ["P0 has 10"]), (Caching.NONE, [])]
)
def test_below_decode_caching_only_p_may_be_believed_to_keep_anything(
    caching: Caching, learned: list[str]
) -> None:
    story = Story(caching)
    assert story.place("P0", "D0") == ["P0 Prefill 10 hold"]
    assert story.started("P0") == ["D0 Allocate forward 0+10"]
    assert story.allocated("D0", "forward", 0, 2) == ["P0 Transmit forward [0:2]"]
    assert story.output("P0", 1, "length") == ["deliver prompt tokens", *learned]
    assert story.sent("P0", "forward", 2) == [
        "D0 Commit forward 200 pin",
        "D0 Decode 10+1 (1 generated)",
    ]
    assert story.inserted("D0", "forward", 8) == []
    assert story.output("D0", 4, "length") == ["deliver tokens final"]
    assert story.finished("D0") == ["P0 Abort", "D0 Abort", "ended"]


def test_colocated_runs_whole() -> None:
    story = Story(Caching.FULL)
    assert story.place("PD0") == ["PD0 Prefill 10 whole"]
    assert story.started("PD0") == []
    assert story.output("PD0", 1) == ["deliver prompt tokens"]
    assert story.output("PD0", 4, "length") == ["deliver prompt tokens final", "PD0 has 14"]
    assert story.finished("PD0") == ["PD0 Abort", "ended"]


def test_the_kv_waits_for_the_reservation() -> None:
    story = Story()
    story.place("P0", "D0")
    story.started("P0")
    assert story.output("P0", 1, "length") == ["deliver prompt tokens", "P0 has 10"]
    assert story.life.phase is Phase.HANDOFF
    assert story.allocated("D0", "forward", 0, 2) == ["P0 Transmit forward [0:2]"]


def test_a_stop_token_as_the_first_token_ends_on_p() -> None:
    story = Story().until_ordered()
    assert story.output("P0", 1, "stop") == [
        "deliver prompt tokens final",
        "P0 has 10",
        "P0 Abort",
        "D0 Abort",
    ]
    # P may be writing by then: D keeps the blocks until P has answered.
    assert story.sent("P0", "forward", 2) == ["D0 Cancel forward", "ended"]


def test_d_samples_the_first_token_itself_where_p_s_must_not_be_taken_for_prompt() -> None:
    story = Story(resample=True)
    assert story.place("P0", "D0") == ["P0 Prefill 10 hold resample"]
    story.started("P0")
    story.allocated("D0", "forward", 0, 2)
    assert story.output("P0", 1, "length") == ["deliver prompt", "P0 has 10"]
    assert story.sent("P0", "forward", 2) == [
        "D0 Commit forward 200 pin",
        "D0 Decode 10+0 (0 generated) hold",
    ]
    assert story.output("D0", 5, "length") == ["deliver tokens final"]


def test_prompt_logprobs_come_ahead_of_the_first_token() -> None:
    story = Story().until_ordered()
    assert story.output("P0", 0) == ["deliver prompt"]
    assert story.output("P0", 1, "length") == ["deliver prompt tokens", "P0 has 10"]


def test_a_stop_string_lets_d_finish_early_and_give_back() -> None:
    story = Story().until_decode()
    assert story.stop() == ["D0 Abort hold"]
    assert story.output("D0", 1) == [], "the engine had one step in flight"
    assert story.finished("D0", held_tokens=13) == ["D0 has 12", "P0 Allocate back 10+2"]


def test_a_stop_string_on_a_colocated_instance_teaches_the_tree() -> None:
    story = Story()
    story.place("PD0")
    story.output("PD0", 3)
    assert story.stop() == ["PD0 Abort hold"]
    assert story.finished("PD0", held_tokens=12) == ["PD0 has 12", "PD0 Abort", "ended"]


def test_a_stop_string_where_nothing_is_kept_frees_at_once() -> None:
    story = Story(Caching.PREFILL).until_decode()
    assert story.stop() == ["P0 Abort", "D0 Abort", "ended"]


def test_a_stop_string_in_the_first_token_frees_both() -> None:
    story = Story().until_handoff()
    assert story.stop() == ["P0 Abort", "D0 Abort"]
    assert story.transmit_failed("P0", "forward") == ["D0 Cancel forward", "ended"]


def test_nothing_is_returned_that_p_has_computed_itself() -> None:
    story = Story(prompt=10, max_tokens=2).until_handoff()
    story.sent("P0", "forward", 2)
    story.inserted("D0", "forward", 8)
    assert story.output("D0", 1, "length") == ["deliver tokens final"]
    assert story.finished("D0", held_tokens=11) == ["D0 has 11", "P0 Abort", "D0 Abort", "ended"]


def test_a_second_attempt_returns_only_beyond_its_own_prefill() -> None:
    story = Story(prompt=10, max_tokens=12).until_decode()
    story.output("D0", 6)
    story.lost("D0")
    assert story.place("P0", "D1") == ["P0 Prefill 18 (8 generated) hold"]
    story.started("P0")
    story.allocated("D1", "forward", 0, 4)
    story.output("P0", 1, "length")
    assert story.sent("P0", "forward", 4) == [
        "D1 Commit forward 400 pin",
        "D1 Decode 18+1 (9 generated) hold",
    ]
    story.inserted("D1", "forward", 16)
    story.output("D1", 1, "stop")
    # 19 tokens are held: the four full blocks were all in P's second prefill.
    assert story.finished("D1", held_tokens=19) == ["D1 has 19", "P0 Abort", "D1 Abort", "ended"]


def test_no_place_fails_the_request() -> None:
    story = Story()
    assert lines(story.life.give_up("no instance")) == ["fail: no instance", "ended"]
    assert story.cancel() == []


def test_a_cancel_while_it_waits_for_a_place_ends_it() -> None:
    assert Story().cancel() == ["ended"]


# ── failures that users of comparable systems reported, by their numbers there ────────────────


def test_01_an_aborted_transfer_frees_the_reservation() -> None:
    story = Story().until_ordered()
    assert story.cancel() == ["P0 Abort", "D0 Abort"]
    assert story.transmit_failed("P0", "forward") == ["D0 Cancel forward", "ended"]


def test_02_a_sender_that_cannot_write_lets_d_start_at_once() -> None:
    story = Story().until_handoff()
    assert story.transmit_failed("P0", "forward") == [
        "D0 Cancel forward",
        "P0 Abort",
        "D0 Decode 10+1 (1 generated) hold",
    ]


def test_02_also_when_it_fails_before_the_first_token() -> None:
    story = Story().until_ordered()
    assert story.transmit_failed("P0", "forward") == ["D0 Cancel forward"]
    assert story.output("P0", 1, "length") == [
        "deliver prompt tokens",
        "P0 has 10",
        "P0 Abort",
        "D0 Decode 10+1 (1 generated) hold",
    ]


def test_04_transfer_ids_are_the_scheduler_s_and_new_at_each_attempt() -> None:
    story = Story().until_handoff()
    story.lost("D0")
    story.place("P0", "D1")
    story.started("P0")
    stale = Allocated(
        instance=InstanceId("D1"),
        epoch=1,
        transfer_id=TransferId("r/forward/1"),
        hit_blocks=0,
        block_ids=[],
    )
    assert story.step(stale) == []
    assert story.allocated("D1", "forward", 0, 2) == ["P0 Transmit forward [0:2]"]


@pytest.mark.parametrize("answer", ["sent", "failed"])
def test_05_blocks_are_not_freed_while_the_sender_may_write(answer: str) -> None:
    story = Story().until_handoff()
    assert "D0 Cancel forward" not in story.cancel()
    assert story.life.phase is Phase.DRAIN
    if answer == "sent":
        assert story.sent("P0", "forward", 2) == ["D0 Cancel forward", "ended"]
    else:
        assert story.transmit_failed("P0", "forward") == ["D0 Cancel forward", "ended"]


def test_05_a_dead_sender_is_quiet() -> None:
    story = Story().until_handoff()
    story.cancel()
    assert story.lost("P0") == ["D0 Cancel forward", "ended"]


def test_05_an_expired_reservation_stops_the_sender_first() -> None:
    story = Story().until_handoff()
    goes_on = ["P0 Abort", "D0 Decode 10+1 (1 generated) hold"]  # which makes P answer
    assert story.expired("D0", "forward") == goes_on
    assert story.expired("D0", "forward") == [], "said again while P has not answered"
    assert story.transmit_failed("P0", "forward") == ["D0 Cancel forward"]


def test_05_the_end_waits_for_a_sender_that_was_late() -> None:
    story = Story(Caching.PREFILL).until_handoff()
    story.expired("D0", "forward")
    story.started("D0")
    story.output("D0", 4, "length")
    assert story.finished("D0") == ["D0 Abort"]
    assert story.sent("P0", "forward", 2) == ["D0 Cancel forward", "ended"]


def test_07_a_prompt_refused_on_p_fails_and_both_are_told() -> None:
    story = Story()
    story.place("P0", "D0")
    assert story.rejected("P0") == ["fail: too long", "P0 Abort", "ended"]
    story = Story().until_ordered()
    assert story.output("P0", 0, "error") == [
        "fail: instance P0 gave up the request",
        "P0 Abort",
        "D0 Abort",
    ]
    assert story.finished("P0") == []
    assert story.transmit_failed("P0", "forward") == ["D0 Cancel forward", "ended"]


def test_08_the_receiver_is_told_how_many_bytes_must_be_there() -> None:
    story = Story().until_handoff()
    assert "D0 Commit forward 150 pin" in story.sent("P0", "forward", 2, size_bytes=150)
    # D counts, frees the blocks and computes the prompt itself; the tree learns nothing.
    assert story.insert_failed("D0", "forward") == []
    assert story.output("D0", 4, "length") == ["deliver tokens final"]


def test_09_a_dead_d_frees_p_at_once() -> None:
    story = Story().until_handoff()
    assert story.lost("D0") == ["P0 Cancel forward", "P0 Abort", "place again"]


def test_10_a_cancel_between_prefill_and_decode_tells_whoever_holds_something() -> None:
    story = Story()
    story.place("P0", "D0")
    story.started("P0")
    story.output("P0", 1, "length")
    # D was asked, P was not ordered to send: nobody can be writing.
    assert story.cancel() == ["D0 Cancel forward", "P0 Abort", "D0 Abort", "ended"]
    assert story.allocated("D0", "forward", 0, 2) == []


def test_12_a_failed_transfer_never_ends_in_garbage() -> None:
    story = Story().until_handoff()
    story.transmit_failed("P0", "forward")
    assert story.output("D0", 4, "length") == ["deliver tokens final"]
    assert story.finished("P0", held_tokens=10) == [], "late, and not about D"
    assert story.finished("D0", held_tokens=14) == ["D0 has 14", "D0 Abort", "ended"]


def test_13_a_full_hit_on_d_still_ends_p_s_pin() -> None:
    story = Story()
    story.place("P0", "D0")
    story.started("P0")
    assert story.allocated("D0", "forward", 2, 0) == ["P0 Transmit forward [2:2]"]
    story.output("P0", 1, "length")
    assert story.sent("P0", "forward", 0) == [
        "D0 Commit forward 0 pin",
        "D0 Decode 10+1 (1 generated) hold",
    ]


@pytest.mark.parametrize("prompt", [1, 3, 4, 5, 7, 8, 9])
def test_15_16_17_positions_at_block_boundaries(prompt: int) -> None:
    """What is returned begins where P's own tokens end and stops at the last full block."""
    story = Story(prompt=prompt, max_tokens=6)
    story.place("P0", "D0")
    story.started("P0")
    blocks = prompt // BLOCK_SIZE
    story.allocated("D0", "forward", 0, blocks)
    story.output("P0", 1, "length")
    assert story.sent("P0", "forward", blocks)[1] == f"D0 Decode {prompt}+1 (1 generated) hold"
    story.inserted("D0", "forward", blocks * BLOCK_SIZE)
    story.output("D0", 5, "length")
    held = prompt + 5
    full = held // BLOCK_SIZE * BLOCK_SIZE
    assert story.finished("D0", held) == [
        f"D0 has {held}",
        f"P0 Allocate back {prompt}+{full - prompt}",
    ]


def test_17_one_token_needs_no_decode() -> None:
    story = Story(max_tokens=1)
    assert story.place("P0", "D0") == ["P0 Prefill 10 whole"]
    assert story.started("P0") == []
    assert story.output("P0", 1, "length") == ["deliver prompt tokens final", "P0 has 10"]
    assert story.finished("P0") == ["P0 Abort", "ended"]


def test_18_nobody_is_believed_to_hold_more_than_there_is() -> None:
    story = Story().until_handoff()
    story.sent("P0", "forward", 2)
    assert story.inserted("D0", "forward", 4096) == ["D0 has 11"]
    story.output("D0", 1)
    story.stop()
    assert story.finished("D0", held_tokens=4096) == ["D0 has 12", "P0 Allocate back 10+2"]


def test_19_d_goes_on_when_p_dies() -> None:
    story = Story().until_decode()
    assert story.lost("P0") == []
    assert story.output("D0", 3, "length") == ["deliver tokens final"]
    # P's next life knows nothing of the request: there is nobody to give the KV back to.
    assert story.finished("D0", held_tokens=14) == ["D0 has 14", "D0 Abort", "ended"]


def test_19_d_computes_the_prompt_when_p_dies_with_it() -> None:
    story = Story().until_handoff()
    assert story.lost("P0") == ["D0 Cancel forward", "D0 Decode 10+1 (1 generated) hold"]


def test_19_bytes_that_have_arrived_outlive_their_sender() -> None:
    story = Story().until_handoff()
    story.sent("P0", "forward", 2)
    assert story.lost("P0") == []
    assert story.inserted("D0", "forward", 8) == ["D0 has 8"]


def test_20_when_d_cannot_take_the_request_p_is_told() -> None:
    story = Story().until_handoff()
    story.sent("P0", "forward", 2)
    assert story.rejected("D0") == ["fail: too long", "P0 Abort", "D0 Abort", "ended"]


def test_20_a_rejection_that_crosses_with_a_stop_string_ends_it() -> None:
    story = Story().until_handoff()
    story.sent("P0", "forward", 2)
    assert story.stop() == ["D0 Abort hold"]
    assert story.rejected("D0") == ["P0 Abort", "D0 Abort", "ended"]


def test_20_no_room_on_d_is_no_reason_to_fail() -> None:
    story = Story()
    story.place("P0", "D0")
    story.started("P0")
    assert story.refused("D0", "forward") == []
    assert story.output("P0", 1, "length") == [
        "deliver prompt tokens",
        "P0 has 10",
        "P0 Abort",
        "D0 Decode 10+1 (1 generated) hold",
    ]


def test_20_no_room_on_p_ends_the_return() -> None:
    story = Story().until_return()
    assert story.refused("P0", "back") == ["P0 Abort", "D0 Abort", "ended"]


def test_21_d_is_told_of_a_cancel_at_once() -> None:
    story = Story().until_decode()
    assert story.cancel() == ["P0 Abort", "D0 Abort", "ended"]


def test_22_a_failed_prefill_reaches_the_client() -> None:
    story = Story()
    story.place("P0", "D0")
    story.started("P0")
    assert story.output("P0", 0, "error") == [
        "fail: instance P0 gave up the request",
        "D0 Cancel forward",
        "P0 Abort",
        "D0 Abort",
        "ended",
    ]


def test_23_events_of_an_earlier_attempt_change_nothing() -> None:
    story = Story().until_handoff()
    story.lost("D0")
    assert story.finished("P0", held_tokens=10) == [], "crossed with the loss of D"
    story.place("P0", "D0", epoch=2)
    assert story.output("P0", 1, "length", attempt=1) == []
    assert story.finished("P0", held_tokens=10, attempt=1) == []
    assert story.lost("D0", epoch=1) == [], "that life is over already"
    assert story.life.phase is Phase.PREFILL


def test_23_a_dead_sender_is_not_told_when_its_receiver_dies_too() -> None:
    story = Story().until_handoff()
    story.sent("P0", "forward", 2)
    assert story.lost("P0") == []
    assert story.lost("D0") == ["place again"]


def test_24_the_time_of_a_long_prefill_does_not_count_against_the_transfer() -> None:
    story = Story()
    # D is asked when P has begun, not while the request waits in P's queue.
    assert story.place("P0", "D0") == ["P0 Prefill 10 hold"]
    story.started("P0")
    story.allocated("D0", "forward", 0, 2)
    assert story.expired("D0", "forward") == [], "the reservation is still wanted"
    assert story.output("P0", 1, "length") == ["deliver prompt tokens", "P0 has 10"]
    assert "D0 Commit forward 200 pin" in story.sent("P0", "forward", 2)


def test_26_a_disconnect_frees_both_in_every_phase() -> None:
    story = Story()
    story.place("P0", "D0")
    assert story.cancel() == ["P0 Abort", "ended"]
    assert Story().until_handoff().cancel() == ["P0 Abort", "D0 Abort"]
    assert Story().until_decode().cancel() == ["P0 Abort", "D0 Abort", "ended"]
    assert Story().until_return().cancel() == [], "the client had everything"


def test_36_only_the_first_attempt_speaks_of_the_prompt() -> None:
    story = Story().until_handoff()
    story.lost("D0")
    story.place("P1", "D1")
    assert story.started("P1", cached_tokens=8) == ["D1 Allocate forward 0+11"]
    assert story.life.cached_tokens == 0
    assert story.output("P1", 1, "length") == ["deliver tokens", "P1 has 11"]


# ── placed again ──────────────────────────────────────────────────────────────────────────────


def test_the_prompt_goes_on_with_what_the_client_has() -> None:
    story = Story().until_decode()
    assert story.lost("D0") == ["P0 Abort", "place again"]
    assert story.life.phase is Phase.UNPLACED
    assert story.place("P0", "D1") == ["P0 Prefill 12 (2 generated) hold"]


def test_it_is_not_placed_more_often_than_allowed() -> None:
    story = Story(max_attempts=2).until_decode()
    story.lost("D0")
    story.place("P0", "D1")
    assert story.lost("P0") == ["fail: instance P0 was lost, at attempt 2", "ended"]


def test_resampled_requests_cannot_go_on_elsewhere() -> None:
    story = Story(resample=True).until_handoff()
    story.sent("P0", "forward", 2)
    story.output("D0", 1)
    assert story.lost("D0") == ["fail: instance D0 was lost in mid-generation", "P0 Abort", "ended"]
    story = Story(resample=True).until_handoff()
    assert story.lost("D0")[-1] == "place again", "the client has no token yet"


@pytest.mark.parametrize("lost", ["P0", "D0"])
def test_a_loss_during_the_return_only_ends_it(lost: str) -> None:
    other = {"P0": "D0", "D0": "P0"}[lost]
    story = Story().until_return()
    story.allocated("P0", "back", 2, 1)
    assert story.lost(lost) == [f"{other} Cancel back", f"{other} Abort", "ended"]


def test_a_worker_that_starts_a_request_twice_is_asked_for_one_reservation() -> None:
    story = Story().until_ordered()
    assert story.started("P0") == []


def test_a_prefill_that_never_reported_its_start_is_decoded_cold() -> None:
    story = Story()
    story.place("P0", "D0")
    assert story.output("P0", 1, "length") == [
        "deliver prompt tokens",
        "P0 has 10",
        "P0 Abort",
        "D0 Decode 0+11 (1 generated) hold",
    ]


# ── fetching from another instance ────────────────────────────────────────────────────────────


def test_p_fetches_what_another_instance_holds_before_its_prefill() -> None:
    story = Story()
    assert story.place("P0", "D0", fetch=("P1", 8)) == ["P0 Allocate fetch 0+8"]
    assert story.allocated("P0", "fetch", 1, 1) == ["P1 Transmit fetch [1:2] of 8 tokens"]
    assert story.sent("P1", "fetch", 1) == ["P0 Commit fetch 100 pin", "P0 Prefill 8+2 hold"]
    assert story.inserted("P0", "fetch", 8) == ["P0 has 8"]
    assert story.started("P0", 8) == ["D0 Allocate forward 0+10"]
    assert story.life.cached_tokens == 8
    assert story.allocated("D0", "forward", 0, 2) == ["P0 Transmit forward [0:2]"]
    assert story.output("P0", 1, "length") == ["deliver prompt tokens", "P0 has 10"]
    assert story.sent("P0", "forward", 2) == [
        "D0 Commit forward 200 pin",
        "D0 Decode 10+1 (1 generated) hold",
    ]


def test_a_request_that_runs_whole_fetches_too() -> None:
    story = Story(prompt=8)
    assert story.place("PD0", fetch=("D0", 4)) == ["PD0 Allocate fetch 0+4"]
    assert story.allocated("PD0", "fetch", 0, 1) == ["D0 Transmit fetch [0:1] of 4 tokens"]
    assert story.sent("D0", "fetch", 1) == ["PD0 Commit fetch 100 pin", "PD0 Prefill 4+4 whole"]
    assert story.inserted("PD0", "fetch", 4) == ["PD0 has 4"]
    assert story.output("PD0", 5, "stop") == ["deliver prompt tokens final", "PD0 has 12"]
    assert story.finished("PD0") == ["PD0 Abort", "ended"]


def test_d_may_be_the_source_and_is_then_told_the_whole_prompt_later() -> None:
    story = Story().until_fetching(source="D0")
    assert story.sent("D0", "fetch", 1) == ["P0 Commit fetch 100 pin", "P0 Prefill 8+2 hold"]
    story.inserted("P0", "fetch", 8)
    assert story.started("P0", 8) == ["D0 Allocate forward 0+10"]


def test_nothing_is_sent_when_p_holds_it_all_by_now() -> None:
    story = Story()
    story.place("P0", "D0", fetch=("P1", 8))
    assert story.allocated("P0", "fetch", 2, 0) == ["P0 Commit fetch 0 pin", "P0 Prefill 8+2 hold"]
    assert story.inserted("P0", "fetch", 8) == ["P0 has 8"]


def test_no_room_for_the_fetch_is_a_plain_prefill() -> None:
    story = Story()
    story.place("P0", "D0", fetch=("P1", 8))
    assert story.refused("P0", "fetch") == ["P0 Prefill 8+2 hold"]
    assert story.started("P0") == ["D0 Allocate forward 0+10"]


def test_a_source_that_has_it_no_more_leaves_a_plain_prefill() -> None:
    story = Story().until_fetching()
    assert story.transmit_failed("P1", "fetch") == ["P0 Cancel fetch", "P0 Prefill 8+2 hold"]
    assert story.started("P0") == ["D0 Allocate forward 0+10"]


def test_lost_bytes_leave_a_plain_prefill() -> None:
    story = Story().until_fetching()
    story.sent("P1", "fetch", 1, size_bytes=99)
    assert story.insert_failed("P0", "fetch") == []
    assert story.started("P0") == ["D0 Allocate forward 0+10"]


def test_a_fetch_has_its_own_deadline() -> None:
    story = Story()
    source = Fetch(Seat(InstanceId("P1"), 1), 8, deadline_s=0.25)
    plan = Plan(Seat(InstanceId("P0"), 1), Seat(InstanceId("D0"), 1), False, False, True, source)
    (allocate,) = [a.command for a in story.life.place(plan) if isinstance(a, Send)]
    assert isinstance(allocate, Allocate) and allocate.deadline_s == 0.25


def test_only_what_d_runs_on_is_waited_for() -> None:
    """And D is told how much is to be generated."""
    seats = Seat(InstanceId("P0"), 1), Seat(InstanceId("D0"), 1)
    source = Fetch(Seat(InstanceId("P1"), 1), 8, deadline_s=0.25)
    plan = Plan(*seats, False, False, True, source, expected_tokens=77)
    story = Story()
    story.epochs |= {"P0": 1, "D0": 1, "P1": 1}
    (fetched,) = [a.command for a in story.life.place(plan) if isinstance(a, Send)]
    story.refused("P0", "fetch")
    started = Started(
        instance=InstanceId("P0"),
        epoch=1,
        request_id=story.life.spec.id,
        attempt=1,
        cached_tokens=0,
    )
    (forward,) = [a.command for a in story.life.step(started) if isinstance(a, Send)]
    assert isinstance(fetched, Allocate) and isinstance(forward, Allocate)
    assert (fetched.patience_s, fetched.expected_tokens) == (0.0, 0)
    assert (forward.patience_s, forward.expected_tokens) == (300.0, 77)


def test_p_computes_what_a_hung_source_does_not_send() -> None:
    story = Story().until_fetching()
    assert story.expired("P0", "fetch") == ["P1 Cancel fetch", "P0 Prefill 8+2 hold"]
    assert story.expired("P0", "fetch") == [], "said again while the source has not answered"
    assert story.started("P0") == ["D0 Allocate forward 0+10"]
    story.allocated("D0", "forward", 0, 2)
    story.output("P0", 1, "length")
    story.sent("P0", "forward", 2)
    # What comes late is not taken, but only now are the blocks free.
    assert story.sent("P1", "fetch", 1) == ["P0 Cancel fetch"]
    assert story.output("D0", 4, "length") == ["deliver tokens final"]


def test_a_request_ends_when_its_hung_source_is_lost() -> None:
    story = Story()
    story.place("PD0", fetch=("PD1", 8))
    story.allocated("PD0", "fetch", 0, 2)
    assert story.expired("PD0", "fetch") == ["PD1 Cancel fetch", "PD0 Prefill 8+2 whole"]
    story.output("PD0", 5, "length")
    assert story.finished("PD0") == ["PD0 Abort"]
    assert story.life.phase is Phase.DRAIN
    assert story.lost("PD1") == ["PD0 Cancel fetch", "ended"]


def test_an_abandoned_fetch_may_outlive_its_attempt() -> None:
    story = Story().until_fetching()
    story.expired("P0", "fetch")
    assert story.lost("D0") == ["P0 Abort", "place again"]
    assert story.place("P0", "D1", fetch=("P1", 8)) == ["P0 Allocate fetch 0+8"]
    late = TransferId("r/fetch/1")
    event = TransmitFailed(**story._from("P1"), transfer_id=late, reason="cancelled")
    assert story.step(event) == ["P0 Cancel fetch"]
    assert story.allocated("P0", "fetch", 1, 1) == ["P1 Transmit fetch [1:2] of 8 tokens"]


@pytest.mark.parametrize("is_ordered", [False, True])
def test_a_lost_source_leaves_a_plain_prefill(is_ordered: bool) -> None:
    story = Story()
    story.place("P0", "D0", fetch=("P1", 8))
    if is_ordered:
        story.allocated("P0", "fetch", 1, 1)
    assert story.lost("P1") == ["P0 Cancel fetch", "P0 Prefill 8+2 hold"]
    assert story.allocated("P0", "fetch", 1, 1) == []


def test_a_source_lost_after_the_fetch_matters_to_nobody() -> None:
    story = Story().until_fetching()
    story.sent("P1", "fetch", 1)
    assert story.lost("P1") == []
    assert story.inserted("P0", "fetch", 8) == ["P0 has 8"]
    assert story.started("P0", 8) == ["D0 Allocate forward 0+10"]


def test_p_lost_in_the_fetch_is_a_new_placement_and_the_source_stops() -> None:
    story = Story().until_fetching()
    assert story.lost("P0") == ["P1 Cancel fetch", "place again"]
    assert story.place("P1", "D0") == ["P1 Prefill 10 hold"]


def test_d_lost_in_the_fetch_is_a_new_placement() -> None:
    story = Story().until_fetching()
    assert story.lost("D0") == ["P1 Cancel fetch", "P0 Abort", "place again"]
    assert story.place("P0", "D1") == ["P0 Prefill 10 hold"]


def test_d_lost_as_the_source_is_a_new_placement_at_once() -> None:
    story = Story().until_fetching(source="D0")
    assert story.lost("D0") == ["P0 Cancel fetch", "P0 Abort", "place again"]


def test_a_client_that_leaves_before_anything_is_sent() -> None:
    story = Story()
    story.place("P0", "D0", fetch=("P1", 8))
    assert story.cancel() == ["P0 Cancel fetch", "P0 Abort", "ended"]


def test_a_client_that_leaves_in_the_fetch_frees_the_blocks_when_the_source_is_quiet() -> None:
    story = Story().until_fetching()
    assert story.cancel() == ["P1 Cancel fetch", "P0 Abort"]
    assert story.transmit_failed("P1", "fetch") == ["P0 Cancel fetch", "ended"]
    story = Story().until_fetching()
    story.cancel()
    assert story.sent("P1", "fetch", 1) == ["P0 Cancel fetch", "ended"]
