"""The embedded model, converted for real: a folder that transformers reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memserve.models import ModelCache, find_bundled


@pytest.mark.integration
@pytest.mark.timeout(300)
def test_bundled_model_converts(tmp_path: Path) -> None:
    folder = ModelCache(tmp_path).folder(find_bundled())

    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["num_hidden_layers"] == 30
    assert "quantization_config" not in config
    # 134.5 million parameters in bfloat16, and the header.
    assert 268e6 < (folder / "model.safetensors").stat().st_size < 270e6

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "Hello"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
