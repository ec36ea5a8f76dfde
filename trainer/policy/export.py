"""Export weights for use elsewhere: as transformers reads them, or as `model.weights` does.

The prompts of a run become a chat template of Hugging Face, with which transformers and vLLM write the same prompts.
https://huggingface.co/docs/transformers/chat_templating. The tests render both and compare them.
"""

import json
import tempfile
from pathlib import Path
from string import Template
from typing import Any

import jax
import numpy as np
from etils import epath

from conf.chat_template import CLOCK, NO_CLOCK, TEMPLATE_FILE, TOKENIZER_CONFIG, literal
from conf.schema.training.data import QuestionData, TableData
from conf.schema.training.loop import GrpoLoop
from conf.schema.training.model import Model
from conf.schema.training.run_yaml import RunFile
from trainer.data import prompting
from trainer.data.chat import Chat
from trainer.policy.policy import PolicyPrompts, describe, tokenizer_file
from trainer.policy.run_files import COMPANIONS, GENERATION_CONFIG, TOKENIZER_FILE, run_yaml, tokenizer_files
from trainer.pretrained import hf_families, hf_files, peft_files, store
from trainer.pretrained.hf_files import PretrainedError
from trainer.pretrained.run_weights import RUN_FILE

MARK = "\0"
"""Stands for a message in a wording, which it splits."""
ONE_MESSAGE = "{{ messages[-1]['content'] }}"
ADD_SYSTEM = Template(
    "{% if messages[0]['role'] != 'system' %}"
    "{% set messages = [{'role': 'system', 'content': $system}] + messages %}"
    "{% endif %}\n"
)
"""In the language of Jinja, where a line break after a block is no text."""


def chat_template(data: Any, chat: Chat | None) -> str | None:
    """Return the template of `data`; None if its prompts are no function of a message alone, as in plain text.

    Of runs with turns it is the one that they were trained with, after the system message; the wording of the questions
    around the messages (`data.prompt.question`) is left out, so that the model can be talked to.
    """
    if isinstance(data, QuestionData) and chat is not None:
        source, system = chat.template.source, data.prompt.system
        if system is not None:
            source = ADD_SYSTEM.substitute(system=json.dumps(system, ensure_ascii=False)) + source
        return NO_CLOCK + source if CLOCK in source else source
    if isinstance(data, QuestionData) and data.prompt.formatter is None:
        asked = prompting.plain_prompt(data.prompt, MARK)
    elif isinstance(data, TableData) and data.template is not None and len(data.columns_of_prompt) == 1:
        asked = data.template.prompt.format_map({data.columns_of_prompt[0]: MARK})
    else:
        return None
    before, _, after = asked.partition(MARK)
    return f"{literal(data.bos or '')}{literal(before)}{ONE_MESSAGE}{literal(after)}"


FORMATS = ("hf", "slipway", "peft")


def export_weights(
    source: epath.Path, target: epath.Path, form: str, dtype: str | None = None, tokenizer: str | None = None
) -> list[str]:
    """Write the weights of a folder or a checkpoint to another folder; return notes for the user.

    LoRA adapters are merged into their matrices; with form `peft`, only the adapters are written.

    With form `hf` it holds one weight of all layers and a file of at most SHARD_BYTES in memory, with `slipway` all
    weights. What a run was (run.yaml) goes with its weights.

    Raises:
        RunFileError: the source has no weights, or they cannot be read.
        UnknownArchitectureError: transformers has no class for the model; the message says what else is possible.
    """
    cfg, experiment = describe(source)
    if form == "peft":
        peft_files.write_adapter(target, store.read_params(source, cfg), cfg)
        return []
    config: dict[str, Any] = {}
    if form == "hf":
        if not isinstance(cfg, Model):
            raise hf_families.UnknownArchitectureError(f"model: transformers has no {cfg.kind}; use `--format slipway`")
        try:
            config = hf_families.hf_config(cfg)
        except hf_families.UnknownArchitectureError as error:
            raise hf_families.UnknownArchitectureError(
                f"{error}; `--format slipway` exports them for model.weights, `slipway chat` and `slipway generate`"
            ) from None
    files = _tokenizer_files(source, experiment, tokenizer)
    params = store.read_params(source, cfg)
    if isinstance(cfg, Model):
        params, cfg = store.merged(params, cfg), cfg.model_copy(update={"lora": None})
    if isinstance(cfg, Model) and form == "hf":
        extra, notes = _described(files, cfg, experiment)
        hf_files.write_params(target, params, cfg, config | extra, dtype)
    else:
        notes = [] if TOKENIZER_FILE in files or not isinstance(cfg, Model) else [NO_TOKENIZER]
        arrays = jax.tree.map(lambda x: np.asarray(x, dtype=dtype), params)
        target.mkdir(parents=True, exist_ok=True)
        store.write_params(target, arrays, cfg)
    if experiment is not None:
        files[RUN_FILE] = run_yaml(experiment.model_copy(update={"model": cfg})).encode()
    for name, content in files.items():
        (target / name).write_bytes(content)
    return notes


NO_TOKENIZER = "no tokenizer was found, so none is exported; name its tokenizer.json with --tokenizer"


def _tokenizer_files(source: epath.Path, experiment: RunFile | None, tokenizer: str | None) -> dict[str, bytes]:
    """Return the tokenizer's files: the named one's, those of the folder or of the run, or of the run's data."""
    file = epath.Path(tokenizer) if tokenizer else tokenizer_file(source)
    if tokenizer and not file.exists():
        raise PretrainedError(f"--tokenizer: {tokenizer} does not exist")
    if file.exists():
        beside = {name: file.parent / name for name in COMPANIONS}
        return {TOKENIZER_FILE: file.read_bytes()} | {n: f.read_bytes() for n, f in beside.items() if f.exists()}
    return dict(tokenizer_files(experiment.data)) if experiment is not None else {}


def _described(files: dict[str, bytes], cfg: Model, experiment: RunFile | None) -> tuple[dict[str, Any], list[str]]:
    """Complete the files with special tokens, chat template and generation config; return keys of config.json."""
    if TOKENIZER_FILE not in files:
        return {}, [NO_TOKENIZER]
    data = experiment.data if experiment is not None else None
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
        prompts = PolicyPrompts(data, f"{folder}/{TOKENIZER_FILE}")
    names = {i: name for name, i in prompts.tokenizer.special_tokens.items()}
    bos, ends = next(iter(prompts.bos_tokens), None), list(prompts.stop_tokens)
    pad = prompts.tokenizer.special_tokens.get("<pad>", ends[0] if ends else None)
    ids = {"bos_token_id": bos, "eos_token_id": ends[0] if len(ends) == 1 else ends or None, "pad_token_id": pad}
    config = json.loads(files.get(TOKENIZER_CONFIG, b"{}"))
    config.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    config |= {"clean_up_tokenization_spaces": False, "model_max_length": cfg.max_seq_len}
    tokens = {"bos_token": bos, "eos_token": ends[0] if ends else None, "pad_token": pad}
    described = {key: names[i] for key, i in tokens.items() if i in names}
    has_own = not isinstance(data, QuestionData) or data.chat_template == "own"  # whose tokens its template may write
    config = described | config if prompts.chat is not None and has_own else config | described
    template = chat_template(data, prompts.chat)
    if template is not None:
        config.pop("chat_template", None)
        files[TEMPLATE_FILE] = template.encode()
    files[TOKENIZER_CONFIG] = _json(config)
    generation = json.loads(files.get(GENERATION_CONFIG, b"{}")) | ids
    if experiment is not None and isinstance(experiment.loop, GrpoLoop):
        generation["max_new_tokens"] = experiment.loop.max_new_tokens
    files[GENERATION_CONFIG] = _json({key: value for key, value in generation.items() if value is not None})
    return ids, []


def _json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
