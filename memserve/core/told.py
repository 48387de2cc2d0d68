"""What instances were told of one request: its tokens, each once, and at last to forget it.

Collaborators: `lifecycle.py` says who is to do what; `messages.py` has the commands. Whoever was
told anything holds something for the request (its tokens, perhaps pins), until it was told to
forget it, or is dead.
"""

from __future__ import annotations

from memserve.core.vocabulary import Action, Plan, RequestSpec, Seat, Send
from memserve.messages import Abort, Decode, Prefill


class Told:
    """Of one request, in all its attempts."""

    def __init__(self, spec: RequestSpec) -> None:
        self._spec = spec
        self._num_tokens: dict[Seat, int] = {}
        """Of the request's tokens, the first so many."""

    def __contains__(self, seat: object) -> bool:
        return seat in self._num_tokens

    def __len__(self) -> int:
        """How many instances have to forget the request."""
        return len(self._num_tokens)

    def num_tokens(self, seat: Seat) -> int:
        """How many tokens it was told."""
        return self._num_tokens.get(seat, 0)

    def tell(self, seat: Seat, num_tokens: int) -> int:
        """It will know as many from now on; returns how many of them it has been told before."""
        known = min(self.num_tokens(seat), num_tokens)
        self._num_tokens[seat] = num_tokens
        return known

    def prefill(self, plan: Plan, attempt: int, generated: list[int]) -> Send:
        """P computes what it does not hold of the prompt."""
        token_ids = self._spec.prompt_token_ids + generated
        known = self.tell(plan.first, len(token_ids))
        command = Prefill(
            epoch=plan.first.epoch,
            request_id=self._spec.id,
            attempt=attempt,
            request=self._spec.request,
            known_tokens=known,
            token_ids=token_ids[known:],
            whole=plan.decode is None,
            hold=plan.decode is not None,
            is_private=plan.first_is_private,
            resample=self._spec.resample and plan.decode is not None,
            num_generated=len(generated),
        )
        return Send(plan.first.instance, command)

    def decode(self, plan: Plan, attempt: int, generated: list[int]) -> Send:
        """D generates; what it does not hold of the prompt, it computes."""
        assert plan.decode is not None
        token_ids = self._spec.prompt_token_ids + generated
        known = self.tell(plan.decode, len(token_ids))
        command = Decode(
            epoch=plan.decode.epoch,
            request_id=self._spec.id,
            attempt=attempt,
            request=self._spec.request,
            known_tokens=known,
            token_ids=token_ids[known:],
            num_generated=len(generated),
            hold=plan.returns,
            is_private=plan.decode_is_private,
        )
        return Send(plan.decode.instance, command)

    def stop(self, seat: Seat) -> Send:
        """End the run, and keep its KV until told to forget the request."""
        abort = Abort(epoch=seat.epoch, request_id=self._spec.id, hold=True)
        return Send(seat.instance, abort)

    def forget(self, seat: Seat) -> list[Action]:
        """It drops all that it holds for the request; nothing, if that is nothing."""
        if self._num_tokens.pop(seat, None) is None:
            return []
        return [Send(seat.instance, Abort(epoch=seat.epoch, request_id=self._spec.id))]

    def forget_all(self) -> list[Action]:
        return [action for seat in list(self._num_tokens) for action in self.forget(seat)]

    def lost(self, seat: Seat) -> None:
        """This life is over: it holds nothing any more."""
        self._num_tokens.pop(seat, None)
