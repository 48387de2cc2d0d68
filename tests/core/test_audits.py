"""Questions to instances: answered, not answered in time, and by those that are lost."""

from __future__ import annotations

import asyncio

from memserve.audits import Audits
from memserve.core.vocabulary import Seat
from memserve.messages import AnyCommand, Audit, Audited, PoolStats
from memserve.types import InstanceId

P0, D0 = Seat(InstanceId("P0"), 1), Seat(InstanceId("D0"), 4)


class Asked:
    """The instances' side: what they were sent."""

    def __init__(self) -> None:
        self.audits: list[tuple[Seat, Audit]] = []

    def send(self, seat: Seat, command: AnyCommand) -> None:
        assert isinstance(command, Audit) and command.epoch == seat.epoch
        self.audits.append((seat, command))

    def answer(self, number: int) -> Audited:
        seat, audit = self.audits[number]
        return Audited(
            instance=seat.instance,
            epoch=seat.epoch,
            audit_id=audit.audit_id,
            stats=PoolStats(*[0] * 11),
            problems=[],
            holders=[f"answer {number}"],
        )


async def asked_of(audits: Audits, *seats: Seat) -> asyncio.Task[dict[InstanceId, Audited | None]]:
    task = asyncio.create_task(audits.ask(seats))
    await asyncio.sleep(0)  # it has sent its questions
    return task


async def test_each_answer_goes_to_its_question() -> None:
    asked = Asked()
    audits = Audits(asked.send, timeout_s=10.0)
    first, second = await asked_of(audits, P0, D0), await asked_of(audits, P0)
    answers = [asked.answer(number) for number in range(3)]
    for answer in reversed(answers):
        audits.answered(answer)
    assert await first == {"P0": answers[0], "D0": answers[1]}
    assert await second == {"P0": answers[2]}


async def test_who_is_lost_does_not_answer_and_nobody_waits_for_it() -> None:
    asked = Asked()
    audits = Audits(asked.send, timeout_s=10.0)
    task = await asked_of(audits, P0, D0)
    audits.lost(P0.instance)
    audits.answered(asked.answer(0))  # it had been on its way
    audits.answered(asked.answer(1))
    assert await task == {"P0": None, "D0": asked.answer(1)}


async def test_an_answer_that_comes_too_late_is_dropped() -> None:
    asked = Asked()
    audits = Audits(asked.send, timeout_s=0.0)
    assert await audits.ask([P0]) == {"P0": None}
    audits.answered(asked.answer(0))
    assert await audits.ask([]) == {}
