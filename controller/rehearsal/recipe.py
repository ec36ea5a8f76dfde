"""The recipe of a rehearsal: the experiment's own sources, from an emulated Hub that holds small stand-ins of them."""

import array
import io
import os
import random
import re
import struct
import subprocess
from collections.abc import Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from conf.schema.assets import Asset, SourceAddress, parse_source
from conf.schema.config import Config
from conf.schema.training.model import KEYS_FREE_OF_WEIGHTS, Model, family_switches
from conf.strict_json import dumps
from controller.config.pretrained_model import STAND_IN
from controller.core.errors import ConfigError
from controller.core.this_process import own_program
from controller.inputs.resolved_assets import is_referenced

ROWS = Path(__file__).with_name("standins") / "assets" / "text"
TEXT, ROWS_PER_GROUP = "text", 40
"""Of the generated rows: the column, and what rows.parquet has in a row group."""
HUB = "hf://"
PUZZLES = "trainer.puzzles"
SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>", "<|bos|>", "<|endoftext|>", "<|im_end|>", "<end_of_turn>", "<|eot_id|>")
SIZES = KEYS_FREE_OF_WEIGHTS | {"sliding_window", "query_pre_attn_scalar"}
"""Keys of a family that a small model sets, or that leave its weights as they are."""
DATA_KEYS = ("path", "eval_path", "eval_fraction", "text_column", "tokenizer", "bos", "eos")
"""Keys of `data` that a recipe of the Hub decides."""

PLAIN_TEXT = {"chat_template": "none", "chat_template_kwargs": None, "bos": "<bos>", "eos": "<eos>"}
"""Of prompts in turns, whose template the stand-in for a tokenizer does not have."""


def with_recipe(tiny: Config, full: Config, given: Set[str]) -> Config:
    """Return the small config with the experiment's own sources on the Hub, and what it reads of them.

    Args:
        tiny: the config of `scale=tiny`, whose data are local.
        full: the same without a scale.
        given: keys that the user has set, which stay.
    """
    there = [found for found in full.assets.iter_assets() if _sources(found[2])]
    used = {name: (kind, asset) for kind, name, asset in there if is_referenced(full, kind, name)}
    if tiny.data is None or tiny.model is None or full.model is None or not used:
        return tiny
    assets: dict[str, Any] = {f"{kind}s": dict(getattr(tiny.assets, f"{kind}s")) for kind, _ in used.values()}
    read = {key: getattr(full.data, key) for key in DATA_KEYS if hasattr(full.data, key) and hasattr(tiny.data, key)}
    named = {key for key, value in read.items() if _asset_of(value) in used}
    kept = set(named)
    kept |= {"bos", "eos"} if "tokenizer" in named else set()
    kept |= {"eval_path", "eval_fraction", "text_column"} if "path" in named else set()
    data = {key: value for key, value in read.items() if key in kept and f"data.{key}" not in given}
    if "tokenizer" in data and getattr(full.data, "chat_template", "none") != "none":
        data |= PLAIN_TEXT
    model: dict[str, Any] = {}
    if _asset_of(full.model.weights) in used and _is_stand_in(tiny.model) and "model.weights" not in given:
        model = {"weights": full.model.weights, "query_pre_attn_scalar": None}  # null: the head's size, as it is
    wanted = {_asset_of(value) for value in (*data.values(), *model.values())}
    for name in wanted & used.keys():
        kind, asset = used[name]
        assets[f"{kind}s"][name] = asset
    return tiny.model_copy(
        update={
            "assets": tiny.assets.model_copy(update=assets),
            "data": tiny.data.model_copy(update=data),
            "model": tiny.model.model_copy(update=model),
        }
    )


def _sources(asset: Asset) -> list[SourceAddress]:
    """Return what an asset reads of the Hub, a build included; nothing for puzzles, which a small config generates."""
    build = asset.build or ()
    words = [asset.source or "", *(build if PUZZLES not in build else ())]
    return [parse_source(word) for word in words if word.startswith(HUB)]


def _asset_of(value: Any) -> str:
    found = re.match(r"assets://([^/]+)", str(value))
    return found[1] if found else ""


def _is_stand_in(model: Any) -> bool:
    """Return whether a small model is a Gemma 2, of which a stand-in can be written."""
    if not isinstance(model, Model):
        return False
    switches, made = family_switches(STAND_IN), model.model_dump(mode="json")
    return all(made[key] == value for key, value in switches.items() if key not in SIZES)


@contextmanager
def emulated_hub(config: Config, folder: Path) -> Iterator[None]:
    """Serve stand-ins of a config's sources, to this process and those that it starts; nothing without such sources.

    Raises ConfigError if the emulated Hub does not start.
    """
    found = [address for _, _, asset in config.assets.iter_assets() for address in _sources(asset)]
    if not found:
        yield
        return
    for address in found:
        _write_stand_in(folder, address, config)
    before = os.environ.get("HF_ENDPOINT")
    command = own_program("controller.localcloud.hub", str(folder))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        if not (endpoint := server.stdout.readline().strip()):
            raise ConfigError("the emulated Hugging Face Hub did not start")
        os.environ["HF_ENDPOINT"] = endpoint
        try:
            yield
        finally:
            os.environ.pop("HF_ENDPOINT")
            if before is not None:
                os.environ["HF_ENDPOINT"] = before
            server.stdin.close()  # ends it


def _write_stand_in(folder: Path, address: SourceAddress, config: Config) -> None:
    repository = folder / f"{address.kind}s" / address.repository
    repository.mkdir(parents=True, exist_ok=True)
    if address.revision is not None:
        repository = repository.with_name(f"{repository.name}@{quote(address.revision, safe='')}")
    files: dict[str, bytes] = {}
    if address.kind == "dataset":
        content = _rows(address.pattern.rpartition(".")[2], getattr(config.data, "text_column", None) or TEXT)
        files = {_example(address.pattern, number): content for number in range(2)}
    else:
        files = {"tokenizer.json": _tokenizer().encode()}
        if _is_stand_in(config.model):
            assert isinstance(config.model, Model)
            files |= {"config.json": _config_json(config.model).encode(), "model.safetensors": _weights(config.model)}
    for name, content in files.items():
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_bytes(content)


def _rows(suffix: str, column: str) -> bytes:
    """Return a file of generated rows of this kind, whose text is in this column; text where there is no such kind."""
    file = ROWS / f"rows.{suffix}"
    if not file.is_file():
        return (ROWS / "text.txt").read_bytes()
    if column == TEXT:
        return file.read_bytes()
    if suffix != "parquet":
        return file.read_bytes().replace(f'"{TEXT}":'.encode(), f'"{column}":'.encode())
    import pyarrow.parquet

    table, made = pyarrow.parquet.read_table(file), io.BytesIO()
    names = [column if name == TEXT else name for name in table.column_names]
    pyarrow.parquet.write_table(table.rename_columns(names), made, row_group_size=ROWS_PER_GROUP)
    return made.getvalue()


def _example(pattern: str, number: int) -> str:
    """Return a name that matches a pattern."""
    literal = re.sub(r"\[(.)[^]]*\]", lambda found: str(number) if found[1] == "0" else found[1], pattern)
    return re.sub(r"\*+", str(number), literal)


def _tokenizer() -> str:
    """Return a tokenizer.json whose tokens are bytes and special tokens."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": 256 + i, "content": token, **flags, "special": True} for i, token in enumerate(SPECIAL_TOKENS)]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": {letters[byte]: byte for byte in range(256)}, "merges": []}
    return dumps({"version": "1.0", "added_tokens": added, "pre_tokenizer": level, "decoder": level, "model": model})


def _config_json(model: Model) -> str:
    """Return the config.json of a small Gemma 2."""
    types = {"L": "sliding_attention", "G": "full_attention"}
    pattern = model.attention_pattern
    return dumps({
        "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "num_hidden_layers": model.num_layers,
        "hidden_size": model.dim, "num_attention_heads": model.num_heads, "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim, "intermediate_size": model.mlp_dim, "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_seq_len, "sliding_window": model.sliding_window,
        "layer_types": [types[pattern[i % len(pattern)].upper()] for i in range(model.num_layers)],
        "query_pre_attn_scalar": model.head_dim, "attn_logit_softcapping": model.attn_logit_softcap,
        "final_logit_softcapping": model.final_logit_softcap, "rms_norm_eps": model.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta}, "tie_word_embeddings": True,
    })  # fmt: skip


def _weights(model: Model) -> bytes:
    """Return random weights of a small Gemma 2 as safetensors (https://huggingface.co/docs/safetensors)."""
    dim, wide, mlp = model.dim, model.num_heads * model.head_dim, model.mlp_dim
    kv = model.num_kv_heads * model.head_dim
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (model.vocab_size, dim), "norm": (dim,)}
    parts = {"self_attn.q_proj": (wide, dim), "self_attn.k_proj": (kv, dim), "self_attn.v_proj": (kv, dim)}
    parts |= {"self_attn.o_proj": (dim, wide), "mlp.gate_proj": (mlp, dim), "mlp.up_proj": (mlp, dim)}
    parts |= {"mlp.down_proj": (dim, mlp)}
    norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    for layer in range(model.num_layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in parts.items()}
        shapes |= {f"layers.{layer}.{name}_layernorm": (dim,) for name in norms}
    rng = random.Random(0)  # noqa: S311 - no secrets
    body, header = bytearray(), dict[str, Any]()
    for name, shape in shapes.items():
        size = shape[0] * (shape[1] if len(shape) > 1 else 1)
        values = [rng.gauss(0, 0.02) for _ in range(size)] if len(shape) > 1 else [0.0] * size
        begin = len(body)
        body += array.array("f", values).tobytes()
        header[f"model.{name}.weight"] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, len(body)]}
    text = dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(body)
