"""`python -m memserve.workers.convert_gguf FILE.gguf FOLDER`: GGUF to a Hugging Face folder.

Started by `memserve/models.py`, since the orchestrator imports neither torch nor transformers. The
weights are dequantized in float32 and stored as bfloat16. Ends with status 0, or with an error
whose last line on stderr says what went wrong.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def convert(gguf: Path, folder: Path) -> None:
    """Write weights, configuration, tokenizer and chat template of `gguf` into `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        **source,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def main(arguments: list[str]) -> int:
    """The command line. Returns: the exit status."""
    if len(arguments) != 2:
        print("usage: convert_gguf FILE.gguf FOLDER", file=sys.stderr)  # noqa: T201
        return 2
    os.environ["HF_HUB_OFFLINE"] = "1"  # everything is in the file
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    convert(Path(arguments[0]), Path(arguments[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
