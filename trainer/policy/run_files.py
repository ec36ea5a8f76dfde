"""What a run keeps beside its checkpoints, so that its weights can be used without its pod and its data.

RUN/run.yaml says of what model they are and how prompts are written; RUN/tokenizer/ has the tokenizer as files of
Hugging Face's tokenizers library, whatever `data.tokenizer` names.
"""

import json
from collections.abc import Iterator
from typing import Any

import yaml
from etils import epath
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from conf.chat_template import TEMPLATE_FILE, TOKENIZER_CONFIG
from conf.formats import RunFileError
from conf.schema.training.data import Corpus, QuestionData, TextData
from conf.schema.training.run_yaml import RunFile
from trainer.data.batches import Dataset
from trainer.data.chat import stop_ids
from trainer.pretrained.run_weights import RUN_FILE
from trainer.tokenizer import loading
from trainer.tokenizer.loading import VOCAB_SIZE

TOKENIZER_FOLDER = "tokenizer"
TOKENIZER_FILE = "tokenizer.json"
GENERATION_CONFIG = "generation_config.json"
COMPANIONS = (TOKENIZER_CONFIG, "special_tokens_map.json", TEMPLATE_FILE, GENERATION_CONFIG)
"""Files of a Hugging Face model beside tokenizer.json that are kept with it."""


def tokenizer_files(data: Any) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of the tokenizer's files; nothing for data without a tokenizer, or if it is absent.

    Raises:
        RunFileError: the text of a tokenizer of characters, or a file of a model, cannot be read.
    """
    if not isinstance(data, Corpus | QuestionData):
        return
    if data.tokenizer == loading.BYTES:
        library = byte_library(special=not is_plain_text(data))
        yield TOKENIZER_FILE, library.to_str(pretty=True).encode()
        return
    if data.tokenizer == loading.CHARACTERS:
        if isinstance(data, TextData):
            vocabulary = Dataset(data).tokenizer
            characters = [vocabulary.decode([i]) for i in range(vocabulary.vocab_size)]
            yield TOKENIZER_FILE, character_library(characters).to_str(pretty=True).encode()
        return
    path = epath.Path(data.tokenizer)
    if not path.exists():
        return  # the loop reports it, on all processes
    yield TOKENIZER_FILE, path.read_bytes()
    beside = {name: path.parent / name for name in COMPANIONS}
    found = {name: file.read_bytes() for name, file in beside.items() if file.exists()}
    if stops := stop_ids(data.tokenizer):  # those of config.json too, which stays with the weights
        generation = json.loads(found.get(GENERATION_CONFIG, b"{}")) | {"eos_token_id": list(stops)}
        found[GENERATION_CONFIG] = json.dumps(generation, indent=2).encode()
    yield from found.items()


def is_plain_text(data: Any) -> bool:
    """Return whether the data are windows of a text, which has no special tokens."""
    return isinstance(data, TextData) and data.packing == "windows"


def byte_library(*, special: bool = True) -> Tokenizer:
    """Return the tokenizer `bytes` as the library has it: the same ids for every text and special token."""
    vocabulary = {character: byte for byte, character in enumerate(loading.byte_characters())}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    ordered = sorted(loading.ByteTokenizer().special_tokens.items(), key=lambda item: item[1])
    if special:
        made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name, _ in ordered])
        assert made.get_vocab_size() == VOCAB_SIZE
    return made


def character_library(characters: list[str]) -> Tokenizer:
    """Return a tokenizer with one id per character, in the given order; other characters are left out of a text."""
    made = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(characters)}, merges=[]))
    made.decoder = decoders.Fuse()
    return made


def run_yaml(experiment: RunFile) -> str:
    return yaml.safe_dump(experiment.model_dump(mode="json"), sort_keys=False)


def write_run_files(experiment: RunFile) -> None:
    """Write what is missing of a run's files; call it on process 0 only."""
    run = epath.Path(experiment.dir)
    if not (run / RUN_FILE).exists():  # the controller writes it before the launch
        run.mkdir(parents=True, exist_ok=True)
        (run / RUN_FILE).write_text(run_yaml(experiment))
    folder = run / TOKENIZER_FOLDER
    if (folder / TOKENIZER_FILE).exists():
        return
    try:
        files = dict(tokenizer_files(experiment.data))
    except RunFileError:
        return  # the loop reads the same text on all processes, and reports this
    for name in sorted(files, key=lambda name: name == TOKENIZER_FILE):  # last, since it marks that all are there
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(files[name])
