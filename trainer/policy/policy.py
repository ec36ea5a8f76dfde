"""A policy to try by hand: weights of a folder, their tokenizer and prompts, and the sampler, on this machine.

Prompts are written as by the run that trained the policy. `trainer.generate` and `trainer.chat` share its command-line
arguments.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import jax
from etils import epath
from jax.sharding import AxisType

from conf.chat_template import ChatMessage
from conf.formats import RunFileError
from conf.schema.training.data import Corpus, QuestionData, TableData
from conf.schema.training.loop import GrpoLoop
from conf.schema.training.loop_parts import MAX_DECODE_CHUNK
from conf.schema.training.model import AnyModel, Model, different_weights
from conf.schema.training.run_yaml import RunFile
from trainer.corpus import files
from trainer.data import prompting
from trainer.data.chat import Chat, own_chat, stop_ids
from trainer.data.prompting import PromptEncoder
from trainer.distributed.mesh import MESH_AXES
from trainer.models.weights import Params
from trainer.policy.run_files import TOKENIZER_FILE, TOKENIZER_FOLDER, is_plain_text
from trainer.pretrained import run_weights, store
from trainer.sampler import Distribution, Sampler, SamplerSettings, StopCriteria
from trainer.sampler.settings import PLAIN
from trainer.tokenizer.loading import LibraryTokenizer, Tokenizer, load_tokenizer

STREAM_CHUNK = 4
"""Tokens between two updates of what a person sees."""


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn."""

    max_new_tokens: int
    temperature: float
    seed: int = 0
    drawn_from: Distribution = PLAIN


class Response(NamedTuple):
    """The text of a response, and whether it ended by itself."""

    text: str
    finished: bool


def describe(folder: epath.Path) -> tuple[AnyModel, RunFile | None]:
    """Return the model of a folder of weights, and the run that made them if the folder says so.

    The run says how the model is computed, which config.json of an exported one does not.

    Raises:
        RunFileError: there are no weights, or run.yaml cannot be read.
    """
    found, experiment = store.read_model(folder), run_weights.read_experiment(folder)
    known = experiment is not None and not different_weights(found, experiment.model)
    return (experiment.model, experiment) if experiment and known else (found, None)


def tokenizer_file(folder: epath.Path) -> epath.Path:
    """Return the tokenizer of a folder of weights, which may not exist."""
    if run_weights.is_checkpoint(folder):
        return folder.parent.parent / TOKENIZER_FOLDER / TOKENIZER_FILE
    return folder / TOKENIZER_FILE


class PolicyPrompts:
    """Encodes questions, conversations and plain text.

    Attributes:
        chat: the turns of a chat; None for a model without turns.
        stop_tokens: ids that end a response.
    """

    def __init__(self, data: Any, tokenizer_file: str) -> None:
        """Take `data` of a run, or None for weights from elsewhere. Raises RunFileError."""
        self.tokenizer: Tokenizer = load_tokenizer(tokenizer_file, "tokenizer")
        self._data = data
        self._questions: PromptEncoder | None = None
        self.chat: Chat | None = None
        if isinstance(data, QuestionData):
            self._questions = PromptEncoder(data.model_copy(update={"tokenizer": tokenizer_file}))
            self.chat, self.stop_tokens = self._questions.chat, self._questions.stop_tokens
            self.bos_tokens = self._questions.bos
            return
        if is_plain_text(data):
            self.stop_tokens, self.bos_tokens = (), []
            return
        if data is None:
            assert isinstance(self.tokenizer, LibraryTokenizer)
            self.chat = own_chat(tokenizer_file, self.tokenizer, only_tuned=True)
        bos = data.bos if isinstance(data, Corpus) else _first_present(self.tokenizer)
        self.bos_tokens = self.chat.bos if self.chat is not None else [self._special(bos)] if bos is not None else []
        ends = [data.eos] if isinstance(data, Corpus) else _usual_ends(self.tokenizer)
        found = [self._special(name) for name in ends if name is not None]
        if data is None and (named := stop_ids(tokenizer_file)):
            own = self.chat.end if self.chat is not None else None
            found = [*([own] if own is not None else []), *named]
        self.stop_tokens = tuple(dict.fromkeys(found))

    @property
    def has_wording(self) -> bool:
        """Return whether `encode_question` adds words to a text: those that the policy was trained on."""
        return self._questions is not None or bool(getattr(self._data, "columns_of_prompt", ()))

    def encode_text(self, text: str) -> list[int]:
        """Return the tokens of a text that the model is to continue."""
        return [*self.bos_tokens, *self._ids(text)]

    def encode_question(self, text: str) -> list[int]:
        """Return the prompt that the run would ask this question with; without questions, that of a chat's turn."""
        if self._questions is not None:
            [question] = self._questions.encode([prompting.Problem(text, "", "")])
            return question.prompt_tokens
        if isinstance(self._data, TableData) and self._data.template is not None:
            columns = self._data.columns_of_prompt
            if len(columns) != 1:
                names = ", ".join(columns)
                raise RunFileError(f"data.template.prompt: needs the columns {names}, not one text; add --raw")
            return self.encode_text(self._data.template.prompt.format_map({columns[0]: text}))
        return self.encode_chat([ChatMessage("user", text)]) if self.chat else self.encode_text(text)

    def encode_chat(self, turns: Sequence[ChatMessage]) -> list[int]:
        """Return the prompt of a conversation, for a policy with turns."""
        assert self.chat is not None, "a policy with turns"
        system = self._data.prompt.system if isinstance(self._data, QuestionData) else None
        if system is not None and turns[0].role != "system":
            turns = [ChatMessage("system", system), *turns]
        [ids] = self.chat.encode([self.chat.write(turns)])
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of a response, without special tokens."""
        return self.tokenizer.decode(tokens)

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode([text])[0].tolist()

    def _special(self, name: str) -> int:
        if name not in self.tokenizer.special_tokens:
            raise RunFileError(f"tokenizer: it has no special token {name}, which the run's data names")
        return self.tokenizer.special_tokens[name]


def _first_present(tokenizer: Tokenizer) -> str | None:
    return next((name for name in ("<bos>", "<|begin_of_text|>", "<s>") if name in tokenizer.special_tokens), None)


def _usual_ends(tokenizer: Tokenizer) -> list[str]:
    usual = ("<eos>", "<end_of_turn>", "<|end_of_text|>", "<|eot_id|>", "<|im_end|>", "<|endoftext|>", "</s>")
    return [name for name in usual if name in tokenizer.special_tokens]


class Policy:
    """Loaded weights that answer prompts."""

    def __init__(self, folder: epath.Path, *, tokenizer: str | None = None, dtype: str | None = None) -> None:
        """Load the weights. Raises RunFileError."""
        cfg, self.experiment = describe(folder)
        if not isinstance(cfg, Model):
            raise RunFileError(f"model.kind: {folder} is a {cfg.kind}, which writes no text; only decoders do")
        if cfg.implementation is not None:
            raise RunFileError(f"model.implementation: {cfg.implementation} has no sampler; only Slipway's decoder has")
        self.cfg = cfg.model_copy(update={"activation_dtype": dtype or cfg.activation_dtype, "remat": "none"})
        found = epath.Path(tokenizer) if tokenizer else tokenizer_file(folder)
        if not found.exists():
            raise RunFileError(f"{found}: there is no tokenizer; name its tokenizer.json with --tokenizer")
        self.prompts = PolicyPrompts(self.experiment.data if self.experiment else None, str(found))
        if self.prompts.tokenizer.vocab_size > cfg.vocab_size:
            raise RunFileError(
                f"{found}: has {self.prompts.tokenizer.vocab_size} ids, more than model.vocab_size, {cfg.vocab_size}; "
                "it is not the tokenizer of these weights"
            )
        self._mesh = jax.make_mesh(
            (1,) * len(MESH_AXES), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES), devices=jax.devices()[:1]
        )
        self._params = store.load_sharded(folder, self.cfg, self._mesh)
        self._copies: dict[int, tuple[Sampler, Params]] = {}

    @property
    def loop(self) -> GrpoLoop | None:
        """Return the GRPO loop that trained the policy, if one did."""
        return self.experiment.loop if self.experiment and isinstance(self.experiment.loop, GrpoLoop) else None

    def default_sampling(self) -> Sampling:
        """Return how the run drew its responses; for other weights, 256 tokens at temperature 1."""
        loop, longest = self.loop, self.cfg.max_sampled_len
        if loop is None:
            return Sampling(min(256, longest // 2), 1.0)
        return Sampling(loop.max_new_tokens, loop.temperature, drawn_from=Distribution.of(loop.sampler))

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        samples: int,
        sampling: Sampling,
        slots: int = 16,
        stream: Callable[[str], object] | None = None,
    ) -> Iterator[tuple[int, Response]]:
        """Yield prompt * samples + sample and the response, as they end.

        stream: called with the text so far of the only response, every few tokens.

        Raises:
            RunFileError: a prompt is empty, or leaves no room for a response.
        """
        longest = max(map(len, prompts))
        room = self.cfg.max_sampled_len - sampling.max_new_tokens
        if not all(prompts):
            raise RunFileError("the prompt is empty")
        if longest > room:
            raise RunFileError(
                f"the prompt has {longest} tokens, and with --max-new-tokens {sampling.max_new_tokens} it exceeds "
                f"model.max_seq_len, {self.cfg.max_sampled_len}"
            )
        settings = SamplerSettings(
            room if stream else min(room, -(-longest // 64) * 64),
            sampling.max_new_tokens,
            min(slots, len(prompts) * samples),
            STREAM_CHUNK if stream else min(MAX_DECODE_CHUNK, sampling.max_new_tokens),
            sampling.drawn_from,
        )
        sampler, copy = self._sampler(settings)
        told = None if stream is None else lambda _, tokens: stream(self.prompts.decode(tokens))
        key = jax.random.key(sampling.seed)
        for drawn in sampler.generate(copy, prompts, samples, key, sampling.temperature, partial_response=told):
            yield drawn.row, Response(self.prompts.decode(drawn.tokens.tolist()), drawn.finished)

    def _sampler(self, settings: SamplerSettings) -> tuple[Sampler, Params]:
        """Return the sampler of some settings with its copy of the weights; the last one is kept."""
        key = hash(settings)
        if key not in self._copies:
            texts, ids = (self.loop.sampler.stop, self.loop.sampler.stop_token_ids) if self.loop else ((), ())
            stops = StopCriteria.of([*self.prompts.stop_tokens, *ids], texts, self.prompts.tokenizer)
            made = Sampler(self.cfg, settings, self._mesh, stops)
            self._copies = {key: (made, made.load_params(self._params))}
        return self._copies[key]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the folder of weights and how to draw responses."""
    parser.add_argument("folder", type=epath.Path, help="RUN/checkpoints/STEP, or a folder of exported weights")
    parser.add_argument(
        "--temperature", type=_number(0, math.inf), metavar="T", help="0: greedy (default: the run's, or 1)"
    )
    parser.add_argument("--top-k", type=count, help="sample from the K likeliest tokens", metavar="K")
    parser.add_argument("--top-p", type=_share, help="sample from the likeliest tokens of probability P", metavar="P")
    parser.add_argument("--min-p", type=_share, help="from those with share P of the likeliest one's", metavar="P")
    for name, bounds in (
        ("repetition", _number(0.01, 100)),
        ("presence", _number(-2, 2)),
        ("frequency", _number(-2, 2)),
    ):
        parser.add_argument(f"--{name}-penalty", type=bounds, help=f"as loop.sampler.{name}_penalty", metavar="X")
    parser.add_argument(
        "--max-new-tokens", type=count, metavar="N", help="tokens of a response (default: the run's, or 256)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="random seed of the samples (default: 0)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="dtype to compute in (default: the run's)")
    parser.add_argument("--tokenizer", metavar="FILE", help="tokenizer.json, if the folder has none")


def load_policy(options: argparse.Namespace) -> tuple[Policy, Sampling]:
    """Return the policy and how to draw its responses. Raises RunFileError."""
    files.use_buckets()
    policy = Policy(options.folder, tokenizer=options.tokenizer, dtype=options.dtype)
    given = {name: value for name, value in vars(options).items() if value is not None}
    sampling = policy.default_sampling()
    chosen = {part.name: given[part.name] for part in fields(Sampling) if part.name in given}
    drawn = {part.name: given[part.name] for part in fields(Distribution) if part.name in given}
    return policy, replace(sampling, drawn_from=replace(sampling.drawn_from, **drawn), **chosen)


def _number(least: float, most: float) -> Callable[[str], float]:
    def parse(word: str) -> float:
        if not least <= (value := float(word)) <= most:
            raise argparse.ArgumentTypeError(f"{word} is not from {least:g} to {most:g}")
        return value

    return parse


def count(word: str) -> int:
    """Parse a number that is at least 1."""
    if (value := int(word)) < 1:
        raise argparse.ArgumentTypeError(f"{word} is below 1")
    return value


def _share(word: str) -> float:
    if not 0 < (value := float(word)) <= 1:
        raise argparse.ArgumentTypeError(f"{word} is not above 0 and at most 1")
    return value
