"""What every worker is born with, by the configuration.

Collaborators: `orchestrator.py` makes it when the model is resolved and the hub has an address;
`cluster.py` asks it for a `WorkerSpec` each time that it starts an instance.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from memserve import profiles
from memserve.config import (
    Config,
    device_in_force,
    engine_settings,
    gpu_plan,
    instance_engine,
    tp_in_force,
)
from memserve.core.profile import Profile
from memserve.engine_args import visible_gpus
from memserve.loras import engine_arguments
from memserve.types import InstanceId, Lora, Role, TransferStyle
from memserve.workers.environment import set_engine_environment
from memserve.workers.spec import WorkerSpec


class WorkerSpecs:
    """Of one run."""

    def __init__(
        self,
        config: Config,
        *,
        model: str,
        loras: Sequence[Lora],
        profile: Profile,
        run_dir: Path,
        hub_address: str,
    ) -> None:
        """`model`: as it was resolved."""
        self._config = config
        self._model = model
        self._loras = list(loras)
        self._profile = profile
        self._run_dir = run_dir
        self._hub_address = hub_address
        self._device = device_in_force(config)
        self._num_threads = profiles.num_threads(config)
        self._tp_of = tp_in_force(config)
        self._plan = gpu_plan(config)
        self._visible_gpus = visible_gpus()

    def environment(self) -> dict[str, str]:
        """For the process that all workers are forked from."""
        environment = dict(os.environ)
        is_eager = bool(engine_settings(self._config).get("enforce_eager"))
        set_engine_environment(
            environment,
            num_threads=self._num_threads,
            log_level=self._config.server.log_level,
            compiles=self._device != "cpu" or not is_eager,
        )
        return environment

    def make(self, instance: InstanceId, role: Role, epoch: int) -> WorkerSpec:
        """For one life of one instance."""
        config, plan = self._config, self._plan
        gpus = () if plan is None else plan.visible_order(instance)
        num_sharing = 1 if plan is None else plan.num_sharing(instance)
        tp = self._tp_of[instance]
        must_measure = num_sharing > 1 and config.kv_bytes is None
        measured = sorted(gpus[:tp]) if must_measure else []
        return WorkerSpec(
            instance=instance,
            epoch=epoch,
            role=role,
            hub_address=self._hub_address,
            run_dir=str(self._run_dir),
            log_path=str(self._run_dir / f"{instance}.log"),
            log_level=config.server.log_level,
            model=self._model,
            engine=engine_arguments(self._loras) | instance_engine(config, num_sharing),
            loras=self._loras,
            kv_bytes=config.kv_bytes,
            layout=config.mempool.layout,
            dram_bytes=config.dram_bytes,
            profile=self._profile,
            reserve_blocks=config.mempool.reserve_blocks,
            heartbeat_interval_s=config.cluster.heartbeat_interval_s,
            num_threads=self._num_threads,
            device=self._device,
            visible_gpus=tuple(self._visible_gpus[gpu] for gpu in gpus),
            tp=tp,
            gpu_locks=tuple(str(self._run_dir / f"gpu-{gpu}.lock") for gpu in measured),
            link=config.transfer.link,
            style=TransferStyle(config.transfer.style),
        )
