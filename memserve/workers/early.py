"""What is sent of requests that are still being computed: the styles `chunk` and `layer`.

    chunk   between steps: the full blocks that the prefill has by now; the link reads them when the
            steps in flight have ended
    layer   in each step: of the blocks that it completes, each layer as soon as it is computed,
            told by the connector's hook; what the hook did not tell of follows after the step

Either can only begin when P knows D's blocks. D is asked when the prefill starts, so these styles
change nothing for prompts of a single step.

A block that a request found in the cache may have been indexed by a step that is still in flight.
Both styles wait for that too: `chunk` by the engine's fence, `layer` by its place in the order of
the device's work, behind all earlier steps.

Collaborators: `engine_loop.py` calls between and inside steps, `sending.py` keeps the parts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from memserve.types import RequestId, TransferId, TransferStyle
from memserve.workers.compat import Engine
from memserve.workers.transfer import Transfers

logger = logging.getLogger(__name__)


class EarlySends:
    """Gives the sender parts of the requests whose KV it waits for. Other styles: does nothing."""

    def __init__(
        self,
        transfers: Transfers,
        engine: Engine,
        engine_id: Callable[[RequestId], str | None],
    ) -> None:
        """`engine_id`: what the engine calls a request; None: it does not run."""
        self._style = transfers.style
        self._sender = transfers.sender
        self._num_layers = transfers.num_layers
        self._engine = engine
        self._engine_id = engine_id
        self._open: list[TransferId] = []
        """Parts of the present step."""
        self._sent_layers: set[int] = set()

    def between_steps(self) -> None:
        """Style `chunk`: choose what is computed, also by the steps that are in flight."""
        if self._style is not TransferStyle.CHUNK or not (awaited := self._sender.awaited()):
            return
        fence = self._engine.fence()
        for request_id in awaited:
            if (engine_id := self._engine_id(request_id)) is not None:
                block_ids, num_tokens = self._engine.running_blocks(engine_id)
                self._sender.computed(request_id, block_ids, num_tokens, fence)

    def on_step(self, num_scheduled: Mapping[str, int]) -> None:
        """Style `layer`: choose what the step, which runs next, completes.

        `num_scheduled`: tokens per engine id, on top of those computed so far.
        """
        if self._style is not TransferStyle.LAYER:
            return
        for request_id in self._sender.awaited():
            engine_id = self._engine_id(request_id)
            if engine_id is None or engine_id not in num_scheduled:
                continue
            block_ids, num_tokens = self._engine.running_blocks(engine_id)
            num_tokens += num_scheduled[engine_id]
            part_id = self._sender.open_layers(request_id, block_ids, num_tokens)
            if part_id is not None:
                self._open.append(part_id)

    def on_layer(self, layer: int) -> None:
        """The step has computed the layer, or queued that."""
        if layer not in self._sent_layers:
            self._sent_layers.add(layer)
            for part_id in self._open:
                self._sender.send_layer(part_id, layer)

    def after_step(self) -> None:
        """All of the step's work is done, or queued. May be called again."""
        if self._open:
            if not self._sent_layers:
                logger.warning("the engine told of no layer: all were sent after the step")
            for layer in range(self._num_layers):
                self.on_layer(layer)
            self._open.clear()
        self._sent_layers.clear()
