"""transformers with the embedded model in float32: what our tokens and logits are compared with. Loaded once."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any


@lru_cache(maxsize=1)
def load_oracle(model_file: Path) -> Any:
    """The model, dequantised once at load; from token ids only (its GGUF tokenizer conversion is another matter)."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        str(model_file.parent), gguf_file=model_file.name, dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )  # fmt: skip
    return model.eval()
