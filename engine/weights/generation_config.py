"""The sampling parameters that a model's authors recommend: generation_config.json of a Hugging Face directory.

GGUF files have no such thing. Its end tokens are the tokenizer's business.
"""

from __future__ import annotations

import logging

from engine.errors import InvalidValueError
from engine.sampling_params import SamplingParams
from engine.weights.checkpoint import read_json, resolve_model

logger = logging.getLogger(__name__)

# Name there -> name in SamplingParams.
_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def generation_defaults(model: str) -> tuple[tuple[str, float], ...]:
    """(name in SamplingParams, value) for each parameter that the model has; ones out of range are left out with a
    warning.

    Raises:
        StartupError: the model cannot be found, or its file is no JSON object.
    """
    checkpoint = resolve_model(model)
    path = checkpoint.path / "generation_config.json"
    if checkpoint.kind != "hf" or not path.is_file():
        return ()
    found = []
    for theirs, ours in _NAMES.items():
        value = read_json(path).get(theirs)
        if value is None:
            continue
        try:
            SamplingParams(**{ours: value}).validate(1)  # type: ignore[arg-type]
        except (InvalidValueError, TypeError) as error:
            logger.warning("%s is not used: %s", path.name, error)
            continue
        found.append((ours, value))
    if found:
        values = ", ".join(f"{name} {value:g}" for name, value in found)
        logger.info("defaults of the model, where a request is silent: %s (--generation-config vllm: none)", values)
    return tuple(found)  # type: ignore[arg-type]
