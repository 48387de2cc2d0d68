"""LoRA adapters for tests: random, but large enough that the outputs differ from the model's."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

_RANK = 4
_SCALE = 0.1


def random_adapter(folder: Path, model: Path, seed: int) -> str:
    """Write an adapter for a Llama-shaped model, in the format of PEFT; returns the folder."""
    config = json.loads((model / "config.json").read_text())
    hidden = config["hidden_size"]
    kv_size = config["num_key_value_heads"] * config["head_dim"]
    rng = torch.Generator().manual_seed(seed)
    weights: dict[str, torch.Tensor] = {}
    for layer in range(config["num_hidden_layers"]):
        for projection, size in (("q_proj", hidden), ("v_proj", kv_size)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{projection}"
            weights[f"{name}.lora_A.weight"] = _SCALE * torch.randn(_RANK, hidden, generator=rng)
            weights[f"{name}.lora_B.weight"] = _SCALE * torch.randn(size, _RANK, generator=rng)
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    adapter = {
        "peft_type": "LORA",
        "r": _RANK,
        "lora_alpha": 2 * _RANK,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    return str(folder)
