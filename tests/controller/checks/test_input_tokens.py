"""Tokens: IDs without a row, tokens that a tokenizer lacks, both renderings where they differ, templates."""

import json
from pathlib import Path
from typing import Any

import pytest

from controller.checks import input_tokens
from controller.checks.input_tokens import turns_are_the_models_own
from controller.checks.preflight import preflight
from controller.localcloud.hub import HubServer
from tests.composed import config_of
from tests.fakes.chat_templates import OWN
from tests.fakes.context import make_context
from tests.hub import hub, write
from tests.paths import ROOT

__all__ = ["hub"]

TUNED = {"bos_token": "<bos>", "eos_token": "<|im_end|>"}
BASE = TUNED | {"eos_token": "<|endoftext|>"}
STOPS = {"generation_config.json": {"eos_token_id": 151643}}
WORDS = ("+experiment=quickstart", "data.tokenizer=assets://mine/tokenizer.json")


def found(folder: Path, files: dict[str, Any], *words: str) -> list[str]:
    """What is said of a tokenizer with these files beside it."""
    for name, content in {"tokenizer.json": {"added_tokens": []}, **files}.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    config = config_of(*WORDS, f"+assets.models.mine.path={folder}", *words)
    return [f"{finding.severity} {finding}" for finding in turns_are_the_models_own(config, make_context(None))]


def own(template: str, described: dict[str, Any] = TUNED) -> dict[str, Any]:
    return {"tokenizer_config.json": described | {"chat_template": template}}


@pytest.mark.parametrize(
    ("form", "files", "words"),
    [
        ("qwen", own(OWN["qwen3"]), []),
        ("gemma", own(OWN["gemma2"]), []),
        ("gemma", own(OWN["gemma3"]), ["data.prompt.system=Sums."]),
        ("llama3", own(OWN["llama3"], TUNED | {"bos_token": "<|begin_of_text|>"}), []),
        ("qwen", own(OWN["qwen2_5"]), ["data.prompt.system=Sums."]),  # it has none of its own then
        ("qwen", {}, []),
        ("none", {}, []),
    ],
)
def test_a_form_that_writes_the_same_is_right(form: str, files: Any, words: list[str], tmp_path: Path) -> None:
    assert found(tmp_path, files, f"data.chat_template={form}", "data.bos=null", *words) == []


@pytest.mark.parametrize(
    ("form", "files", "words", "said"),
    [
        (
            "qwen",
            own(OWN["qwen2_5"]),
            [],
            r"qwen writes '<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n', the model's own template "
            r"'<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
            r"<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n'; set",
        ),
        ("llama3", own(OWN["llama3_2"]), [], "Cutting Knowledge Date: December 2023"),
        (
            "gemma",
            own(OWN["gemma2"]),
            ["data.prompt.system=Sums."],
            "own template refuses it: it cannot write",
        ),
        ("gemma", own(OWN["qwen3"]), [], "gemma writes '<bos><start_of_turn>user"),
        ("gemma", own(OWN["gemma3"], TUNED | {"bos_token": "<s>"}), [], "the model's own template '<s><start_of_turn>"),
        ("qwen", own(OWN["qwen3"]), ["data.bos='<bos>'"], "qwen writes '<bos><|im_start|>"),
        (
            "qwen",
            own(
                "{% for m in messages %}<|im_start|>{{ m.role ~ '\\n' ~ m.content }}<|im_end|>{{ '\\n' if loop.last }}"
                "{% endfor %}{{ '<|im_start|>assistant\\n' }}"
            ),
            [],
            r"<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n",  # which only a second turn shows
        ),
    ],
)
def test_a_form_that_writes_something_else_is_an_error_with_both(
    form: str, files: Any, words: list[str], said: str, tmp_path: Path
) -> None:
    [finding] = found(tmp_path, files, f"data.chat_template={form}", "data.bos=null", *words)
    assert finding.startswith(f"error data.chat_template: {form} writes ")
    assert said in finding
    assert finding.endswith("; set data.chat_template=own")


OWN_WORDS = ("data.chat_template=own", "data.bos=null", "data.eos=null")


def test_a_models_own_template_is_shown_with_its_stops(tmp_path: Path) -> None:
    stops = {"generation_config.json": {"eos_token_id": [128001, 128008]}, "config.json": {"eos_token_id": 128009}}
    shown, dated = found(tmp_path, own(OWN["llama3_2"]) | stops, *OWN_WORDS)
    assert shown.startswith("note data.chat_template: the model's own template writes prompts such as '<bos><|start")
    assert shown.endswith(
        "; responses end at the end of a turn, or the tokens 128001, 128008, 128009 that its files name"
    )
    assert dated.startswith("note data.chat_template: the template asks for today's date")


@pytest.mark.parametrize(
    ("files", "words", "said"),
    [
        ({}, OWN_WORDS, "error data.chat_template: there is no template beside assets://mine/tokenizer.json; copy it"),
        (own("{{ strftime_now('%d') }}"), OWN_WORDS, "cannot be used: it asks for today's date"),
        (own("{% oops %}"), OWN_WORDS, "cannot be used: it is no template of Jinja: line 1: Encountered unknown tag"),
        (
            own(OWN["gemma2"]),
            (*OWN_WORDS, "data.prompt.system=Sums."),
            "error data.prompt.system: the model's own template takes no message of the system: it cannot write this",
        ),
        (
            {"tokenizer_config.json": "{"},
            OWN_WORDS,
            "error data.chat_template: the template beside assets://mine/token",
        ),
        (own(OWN["qwen3"]), (), "note data.chat_template: the model was tuned on a chat, which `own` writes"),
        (
            own(OWN["qwen3"], BASE) | {"generation_config.json": {"eos_token_id": 151643}},
            (),
            "a chat template, but the model stops at <|endoftext|>, as one that was not",
        ),
        (own("{% oops %}"), (), "note data.chat_template: the template beside assets://mine/tokenizer.json cannot be"),
    ],
)
def test_what_cannot_be_used_or_is_not_used_is_said(files: Any, words: Any, said: str, tmp_path: Path) -> None:
    [finding] = found(tmp_path, files, *words)
    assert said in finding
    assert len(finding.splitlines()) == 1


@pytest.mark.parametrize("form", ["own", "gemma"])
def test_bytes_have_no_turns(form: str, tmp_path: Path) -> None:
    [finding] = found(tmp_path, {}, "data.tokenizer=bytes", f"data.chat_template={form}", "data.bos=null")
    assert finding.startswith("error data.chat_template: needs the model's tokenizer.json, not data.tokenizer=bytes; ")
    assert found(tmp_path, {}, "data.tokenizer=bytes") == []


def test_the_name_of_a_folder_says_that_its_model_was_tuned(tmp_path: Path) -> None:
    files = own(OWN["gemma2"], {"bos_token": "<bos>", "eos_token": "<eos>"}) | {"config.json": {"eos_token_id": 1}}
    for name, said in (("gemma-2-9b-it", "the model was tuned on a chat"), ("gemma-2-9b", "the model stops at <eos>")):
        (tmp_path / name).mkdir()
        [finding] = found(tmp_path / name, files)
        assert finding.startswith("note data.chat_template: ")
        assert said in finding


def test_another_template_for_tools_is_named(tmp_path: Path) -> None:
    """In the key, or in the folder in which transformers looks."""
    named = [{"name": "default", "template": OWN["qwen3"]}, {"name": "tool_use", "template": "?"}]
    in_key = {"tokenizer_config.json": TUNED | {"chat_template": named}}
    assert len(found(tmp_path, {"chat_template.jinja": OWN["qwen3"], **in_key}, *OWN_WORDS)) == 1, "the file counts"
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "additional_chat_templates").mkdir()
    for files in (in_key, own(OWN["qwen3"]) | {"additional_chat_templates/tool_use.jinja": "?"}):
        shown, other = found(tmp_path, files, *OWN_WORDS)
        assert "the model's own template writes prompts such as" in shown
        assert other.startswith("note data.chat_template: the template tool_use is not read; environments describe")


def test_files_that_are_not_here_are_left_to_the_run(tmp_path: Path) -> None:
    words = ("data.tokenizer=gs://bucket/tokenizer.json", "data.chat_template=qwen")
    assert found(tmp_path, own(OWN["llama3"]), *words) == []
    single = [
        f"+assets.models.one.path={tmp_path / 'tokenizer.json'}",
        "data.tokenizer=assets://one/tokenizer.json",
        *OWN_WORDS,
    ]
    [finding] = found(tmp_path, own(OWN["qwen3"]), *single)
    assert "there is no template beside assets://one" in finding, "the file beside it is not of the asset"


def test_a_repository_is_asked_for_the_turns_of_its_tokenizer(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the weights, and those of an asset; where a form is asked for, a repository that is closed is a note."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    config = (ROOT / "tests" / "trainer" / "fixtures" / "gemma2" / "config.json").read_bytes()
    described = json.dumps(own(OWN["qwen2_5"])["tokenizer_config.json"]).encode()
    write(hub.state.folder / "models/acme/chat", {"config.json": config, "tokenizer_config.json": described})

    def said(*words: str) -> list[str]:
        made = config_of("+experiment=quickstart", *words)
        return [f"{finding.severity} {finding}" for finding in turns_are_the_models_own(made, make_context(None))]

    sizes = ("~model.vocab_size", "~model.attention_pattern", "~model.sliding_window")
    [shown] = said("model=hf", "model.weights=hf://acme/chat", *sizes)
    assert "the model's own template writes prompts such as '<|im_start|>system\\nYou are Qwen" in shown
    asset = ("+assets.models.mine.source=hf://acme/chat/*", "data.tokenizer=assets://mine/tokenizer.json")
    [refused] = said("model=hf", "model.weights=hf://acme/chat", *sizes, "data.chat_template_kwargs={thinking: false}")
    assert refused.endswith("cannot be used: it reads no variable thinking; it reads none")
    [differs] = said(*asset, "data.chat_template=qwen", "data.bos=null")
    assert differs.startswith("error data.chat_template: qwen writes ")
    [unused] = said(*asset)
    assert unused.startswith("note data.chat_template: the model was tuned on a chat, which `own` writes")
    other = ("+assets.models.mine.source=hf://acme/gated/*", asset[1])
    assert said(*other) == [], "what cannot be read is reported by another check"
    [unread] = said(*other, "data.chat_template=qwen", "data.bos=null")
    assert unread.startswith("note data.chat_template: the template beside assets://mine/tokenizer.json was not read: ")


def test_without_a_network_only_what_was_read_before_is_judged(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    described = json.dumps(own(OWN["qwen2_5"])["tokenizer_config.json"]).encode()
    for name in ("known", "other"):
        write(hub.state.folder / f"models/acme/{name}", {"tokenizer_config.json": described})

    def said(name: str) -> list[str]:
        source = f"+assets.models.mine.source=hf://acme/{name}/*"
        turns = ("data.chat_template=qwen", "data.bos=null")
        made = config_of("+experiment=quickstart", source, "data.tokenizer=assets://mine/tokenizer.json", *turns)
        return [f"{finding.severity} {finding}" for finding in turns_are_the_models_own(made, make_context(None))]

    [differs] = said("known")
    monkeypatch.setattr(input_tokens, "lookup_problem", lambda _: "the Hub cannot be looked up")
    hub.state.requests.clear()
    assert said("known") == [differs]
    [unread] = said("other")
    assert unread.endswith("the template beside assets://mine/tokenizer.json was not read: the Hub cannot be looked up")
    assert hub.state.requests == []


BPE = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2, "content": "<|bos|>"}]}
UNIGRAM = BPE | {"model": {"type": "Unigram", "vocab": [["a", 0.0], ["b", -1.0]]}}
IMAGE = {"id": 99, "content": "<image>", "special": True}
PICTURES = BPE | {"added_tokens": [{"id": 2, "content": "<|bos|>"}, IMAGE]}
LANGUAGE = ("data=text", "model=tiny", "loop=lm", "optimizer=adamw", "cloud=local", "data.path=assets://mine/text.txt")


QUICK = "+experiment=quickstart"
OWN_BOS = """data.bos='<|bos|>'"""


@pytest.mark.parametrize(
    ("document", "words", "said"),
    [
        (
            None,
            [QUICK, "model.vocab_size=10"],
            ["10 is too small for data.tokenizer=bytes, which has 259 IDs; set 259"],
        ),
        (None, [QUICK, "model.vocab_size=259"], []),
        (None, [QUICK, "data.bos='<s>'"], ["data.bos: the tokenizer has no special token <s>; it has <pad>"]),
        (None, [QUICK, "data.eos=['<eos>','</s>']"], ["data.eos: the tokenizer has no special token </s>"]),
        (None, [*LANGUAGE, "data.tokenizer=bytes", "model.vocab_size=255"], ["which has 256 IDs; set 256"]),
        (None, [*LANGUAGE, "data.tokenizer=bytes", "model.vocab_size=256"], []),
        (None, [*LANGUAGE, "data.tokenizer=characters", "model.vocab_size=3"], ["which has 4 IDs; set 4"]),
        (None, [*LANGUAGE, "data.tokenizer=characters", "model.vocab_size=4"], []),
        (None, [QUICK, "loop.sampler.stop=['<bos>',x]"], []),
        (None, [QUICK, "loop.sampler.stop=['a<bos>']"], ["loop.sampler.stop: 'a<bos>' holds the special token <bos>"]),
        (None, [QUICK, "loop.sampler.logit_bias={258:-100.0}", "loop.sampler.stop_token_ids=[258]"], []),
        (
            None,
            [QUICK, "loop.sampler.logit_bias={259:1.0}", "model.vocab_size=259"],
            ["logit_bias: 259 is no token ID"],
        ),
        (
            None,
            [QUICK, "loop.sampler.stop_token_ids=[600]", "model.vocab_size=300"],
            ["those of the model are 0 to 299"],
        ),
        (BPE, [*WORDS, OWN_BOS, "data.eos='<|bos|>'", "model.vocab_size=3"], []),
        (BPE, [*WORDS, OWN_BOS, "data.eos='<|bos|>'", "model.vocab_size=2"], ["which has 3 IDs; set 3"]),
        (UNIGRAM, [*WORDS, OWN_BOS, "model.vocab_size=2"], ["3 IDs", "no special token <eos>; it has <|bos|>"]),
        (PICTURES, [*WORDS, "data.bos=null", "data.eos='<image>'", "model.vocab_size=3"], []),
        ({"model": 1}, WORDS, ["data.tokenizer: "]),
        ({"vocab": {}}, WORDS, ["tokenizer.json has no model with a vocab, as a tokenizer.json has"]),
        ({"model": {"type": "BPE"}}, WORDS, ["tokenizer.json has no model with a vocab"]),
        ([], WORDS, ["name a tokenizer.json of Hugging Face's library"]),
    ],
)
def test_ids_have_rows_and_the_tokens_that_the_data_name_exist(
    document: Any, words: list[str], said: list[str], tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("\ufeffabca b", encoding="utf-8")
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    issues = preflight(config_of(*words, f"+assets.models.mine.path={tmp_path}"))
    found = [str(issue) for issue in issues if issue.check == "tokenizer"]
    assert len(found) == len(said), found
    assert all(expected in line for expected, line in zip(said, found, strict=True)), found


@pytest.mark.parametrize(("largest", "bound", "tokens"), [(9, 26, 0), (9, 25, 26), (90, 26, 27)])
def test_generated_prompts_fit_their_bound(largest: int, bound: int, tokens: int) -> None:
    words = [QUICK, f"data.largest_first={largest}", f"loop.max_prompt_length={bound}"]
    found = [str(issue) for issue in preflight(config_of(*words)) if issue.check == "first_row"]
    told = f"loop.max_prompt_length: a prompt of data=arithmetic has {tokens} tokens or more, and {bound} fit; raise it"
    assert found == ([told] if tokens else [])
