"""Writes config_classes.json: every field of transformers' config classes with its default, by version.

Run it with each version of transformers that is to be compared, each in an environment of its own (4.57.6, 5.23.0,
5.24.0):

    python tests/conf/make_config_classes.py
"""

import dataclasses
import inspect
import json
from pathlib import Path
from typing import Any

import transformers

FILE = Path(__file__).with_name("config_classes.json")
CLASSES = {
    "gemma2": "Gemma2Config",
    "gemma3_text": "Gemma3TextConfig",
    "gemma3": "Gemma3Config",
    "llama": "LlamaConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
    "qwen3_moe": "Qwen3MoeConfig",
    "gpt_oss": "GptOssConfig",
    "gpt2": "GPT2Config",
    "mistral": "MistralConfig",
    "ministral": "MinistralConfig",
    "ministral3": "Ministral3Config",
    "mistral3": "Mistral3Config",
    "gemma": "GemmaConfig",
    "smollm3": "SmolLM3Config",
    "olmo2": "Olmo2Config",
    "granite": "GraniteConfig",
    "phi3": "Phi3Config",
    "olmo3": "Olmo3Config",
    "gemma4_text": "Gemma4TextConfig",
    "gemma4": "Gemma4Config",
    "gemma4_unified_text": "Gemma4UnifiedTextConfig",
    "gemma4_unified": "Gemma4UnifiedConfig",
    "qwen3_5_text": "Qwen3_5TextConfig",
    "qwen3_5": "Qwen3_5Config",
    "qwen3_5_moe_text": "Qwen3_5MoeTextConfig",
    "qwen3_5_moe": "Qwen3_5MoeConfig",
}


def described() -> dict[str, dict[str, Any]]:
    """Return the fields of each class that the installed version has with their defaults, by model_type."""
    known = {kind: getattr(transformers, name) for kind, name in CLASSES.items() if hasattr(transformers, name)}
    return {kind: fields_of(config_class) for kind, config_class in known.items()}


def fields_of(config_class: Any) -> dict[str, Any]:
    """Return the fields of a class: a dataclass's (5), or the arguments of all constructors (4), and those saved."""
    found: dict[str, Any] = {}
    if hasattr(config_class, "__dataclass_fields__"):
        found |= {field.name: field.default for field in dataclasses.fields(config_class)}
    else:
        for parent in reversed(config_class.__mro__[:-1]):
            named = inspect.signature(parent.__init__).parameters.values()
            found |= {word.name: word.default for word in named if word.default is not inspect.Parameter.empty}
    saved = json.loads(config_class().to_json_string(use_diff=False))
    return dict(sorted((saved | found).items()))


if __name__ == "__main__":
    versions = json.loads(FILE.read_text()) if FILE.exists() else {}
    versions[transformers.__version__] = described()
    FILE.write_text(json.dumps(versions, indent=1, sort_keys=True) + "\n")
