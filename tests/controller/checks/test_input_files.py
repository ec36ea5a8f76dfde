"""Absent files and objects are named with what is there instead, and so are columns that the first row lacks."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from controller.checks import input_files
from controller.checks.input_first_row import first_rows_have_the_columns
from controller.core.finding import Check
from tests.composed import config_of as config
from tests.fakes.context import make_context
from tests.fakes.google import MemoryStorage

OFFLINE: tuple[Check[...], ...] = (input_files.files_exist_here, input_files.validation_has_data)
LIVE: tuple[Check[...], ...] = (input_files.objects_exist, input_files.validation_has_objects)
LM = ("cloud.project=acme", "model=tiny", "loop=lm", "optimizer=adamw", "loop.seq_len=1024")
TEXT = (*LM, "data=text", "data.tokenizer=bytes")
JSONL = (*LM, "data=jsonl", "data.tokenizer=bytes")


def offline(*overrides: str) -> list[str]:
    return [f"{f.check}: {f.severity} {f}" for check in OFFLINE for f in check(config(*overrides))]


def live(google: MemoryStorage, *overrides: str) -> list[str]:
    context = make_context(google)
    return [f"{f.check}: {f.severity} {f}" for check in LIVE for f in check(config(*overrides), context)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, size in {"train/a.jsonl": 9000, "train/b.jsonl": 9000, "val/a.jsonl": 900, "tokenizer.json": 9}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * size)
    return tmp_path


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.path=assets://mine/train/*.jsonl", None),
        ("data.path=assets://mine/**/a.jsonl", None),
        ("data.path=assets://mine/*.jsonl", "file_absent: error data.path: assets://mine/*.jsonl: no file matches"),
        ("data.path=assets://mine/train/*.parquet", "file_absent: error data.path: assets://mine/train/*.parquet: no"),
        ("data.path=assets://mine/train", "file_absent: error data.path: assets://mine/train: is a folder; name the"),
        ("data.tokenizer=assets://mine/tokeniser.json", "file_absent: error data.tokenizer: assets://mine/tokeniser.j"),
        ("model.weights=assets://mine/train", "file_absent: error model.weights: assets://mine/train: has neither"),
        ("model.weights=assets://mine/gemma", "file_absent: error model.weights: assets://mine/gemma: there is no"),
    ],
)
def test_a_name_must_match_a_file_of_its_asset(folder: Path, override: str, said: str | None) -> None:
    found = offline(*JSONL, "data.path=assets://mine/train/*.jsonl", f"+assets.datasets.mine.path={folder}", override)
    assert found == [] if said is None else found[0].startswith(said), found


def test_names_of_downloads_are_known_before_they_are_there() -> None:
    found = offline("+experiment=lm_tinyshakespeare", "data.path=assets://text/shakespeare.txt", "data.packing=stream")
    assert found[0] == (
        "file_absent: error data.path: assets://text/shakespeare.txt: no file matches it; nearest: tinyshakespeare.txt"
    )
    assert offline("+experiment=lm_tinyshakespeare") == []
    assert offline("+experiment=gemma2b_gsm8k", "cloud.project=acme") == []  # the weights are made by a command


def test_emulated_workers_read_files_of_this_machine(folder: Path) -> None:
    local = [*JSONL, "cloud=local"]
    assert offline(*local, f"data.path={folder}/train/*.jsonl") == []
    [error] = offline(*local, f"data.path={folder}/train/c.jsonl")
    assert error.endswith(("; nearest: a.jsonl, b.jsonl", "; nearest: b.jsonl, a.jsonl"))
    assert offline(*JSONL, "data.path=/mnt/data/c.jsonl") == []  # only the workers know


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.path=gs://acme/train/*.jsonl", None),
        ("data.path=gs://acme/train/*.parquet", "object_absent: error data.path: gs://acme/train/*.parquet: no"),
        ("data.path=gs://acme/train/a.json", "object_absent: error data.path: gs://acme/train/a.json: no object"),
        ("data.path=gs://acme/trian/deep/*.jsonl", "object_absent: error data.path: gs://acme/trian/deep/*.jsonl: no"),
        ("data.path=gs://acme/train", "object_absent: error data.path: gs://acme/train: is a folder; name the files"),
        ("data.path=gs://ecma/a", "object_absent: error data.path: gs://ecma/a: there is no bucket ecma"),
        ("data.path=gs://theirs/a", "object_absent: warning data.path: gs://theirs/a was not checked: you may not"),
        ("model.weights=gs://acme/gemma", None),
        ("model.weights=gs://acme/gema", "object_absent: error model.weights: gs://acme/gema: no folder matches it;"),
        ("model.weights=gs://acme/train", "object_absent: error model.weights: gs://acme/train: has neither"),
    ],
)
def test_a_name_must_match_an_object_of_its_bucket(override: str, said: str | None) -> None:
    names = ("train/a.jsonl", "train/b.jsonl", "gemma/config.json", "gemma/model.safetensors")
    google = MemoryStorage("theirs", acme=dict.fromkeys(names, b"9 bytes.."))
    found = live(google, *JSONL, "data.path=gs://acme/train/a.jsonl", override)
    assert found == [] if said is None else found[0].startswith(said), found


def test_a_part_is_left_for_validation(folder: Path) -> None:
    text = (*TEXT, f"+assets.datasets.mine.path={folder}", "data.path=assets://mine/train/*.jsonl")
    text = (*text, "data.packing=windows")
    assert offline(*text) == []
    [short] = offline(*text, "data.eval_fraction=0.05")
    assert short == (
        "validation: error data.eval_fraction: 0.05 of 18000 bytes are at most 900 tokens for validation, and "
        "loop.seq_len + 1 = 1025 are required; raise it, or set data.eval_path"
    )
    documents = (*text, "data.packing=documents", "data.separator=null")
    assert offline(*documents)[0].startswith("validation: warning data.eval_fraction: 0.1 of 2 documents, one per file")
    [single] = offline(*documents, "data.path=assets://mine/train/a.jsonl")
    assert single.startswith("validation: error data.eval_fraction: a single document cannot be divided; set data.sep")
    [same] = offline(*text, "data.eval_path=${data.path}", "data.eval_fraction=0")
    assert same.startswith("validation: warning data.eval_path: names the training data, so evaluations measure memory")


def test_a_part_of_a_bucket_is_left_for_validation() -> None:
    google = MemoryStorage(acme={"a.txt": bytes(9000)})
    text = (*TEXT, "data.path=gs://acme/*.txt", "data.packing=windows")
    assert live(google, *text, "data.eval_fraction=0.5") == []
    assert live(google, *text)[0].startswith("validation_objects: error data.eval_fraction: 0.1 of 9000 bytes are at m")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["data.validation_path=gs://b/test.jsonl"], []),
        (
            ["data.validation_path=gs://b/test.jsonl", "checkpoint.best={metric: eval_accuracy, mode: max}"],
            [
                "validation: warning data.validation_path: names the test's questions, by which checkpoint.best would "
                "choose; use null, or other questions"
            ],
        ),
        (["checkpoint.best={metric: eval_accuracy, mode: max}"], []),
        (
            ["data.validation_path=gs://b/train.jsonl"],
            [
                "validation: warning data.validation_path: names the training data, so evaluations measure memory; use "
                "null"
            ],
        ),
    ],
)
def test_the_best_checkpoint_is_not_chosen_by_the_tests_questions(overrides: list[str], said: list[str]) -> None:
    grpo = ("cloud.project=acme", "model=tiny", "loop=grpo", "optimizer=adamw", "data=gsm8k")
    paths = ("data.path=gs://b/train.jsonl", "data.eval_path=gs://b/test.jsonl")
    assert offline(*grpo, *paths, *overrides) == said


QUESTIONS = ("cloud.project=acme", "model=tiny", "loop=grpo", "optimizer=adamw", "data=gsm8k")
LINES = (
    "cloud.project=acme",
    "model=tiny",
    "loop=lm",
    "optimizer=adamw",
    "data=jsonl",
    "data.path=assets://mine/a.jsonl",
)


def issues(rows: Path, *overrides: str) -> list[str]:
    return [str(i) for i in first_rows_have_the_columns(config(*overrides, f"+assets.datasets.mine.path={rows}"))]


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    row = {"question": "2+2?", "final": 4, "level": 1}
    (tmp_path / "a.jsonl").write_text(2 * (json.dumps(row) + "\n"))
    (tmp_path / "slipway").mkdir()
    (tmp_path / "slipway" / "mine.py").write_text("def reward(response, answer, prompt, levle, other=1): return 0\n")
    return tmp_path


def test_a_reward_that_wants_a_column_of_generated_problems_is_named(rows: Path) -> None:
    generated = ("cloud.project=acme", "model=tiny", "loop=grpo", "optimizer=adamw", "data=arithmetic")
    [found] = issues(rows, *generated, "loop.accuracy_reward='mine:reward'")
    assert found == (
        "loop.accuracy_reward: reward mine:reward takes 'levle', but a problem of data=arithmetic has no such column; "
        "only prompt and row are passed too"
    )
    assert issues(rows, *generated) == []
    (rows / "slipway" / "mine.py").write_text("def reward(prompt, response, answer): return 0\n")
    [found] = issues(rows, *generated, "loop.accuracy_reward='mine:reward'")
    assert found.endswith("is called with (response, answer), and the rest by name; put answer among the first two")
    (rows / "slipway" / "mine.py").write_text("def reward(data_source, solution_str, ground_truth): return 0\n")
    assert issues(rows, *generated, "loop.accuracy_reward='mine:reward'") == []  # `extension` tells it


def test_missing_columns_of_questions_and_rewards_are_named(rows: Path) -> None:
    paths = [f"data.{name}=assets://mine/a.jsonl" for name in ("path", "eval_path")]
    found = issues(rows, *QUESTIONS, *paths, "loop.accuracy_reward='mine:reward'")
    missing = f"the first row of {rows}/a.jsonl has no column 'answer'; it has 'question', 'final', 'level'"
    assert found[0] == f"data.answer_column: {missing}"
    assert found[1].startswith(
        f"loop.accuracy_reward: reward mine:reward takes 'levle', but the first row of {rows}/a.jsonl has no such"
    )
    assert len(found) == 3  # eval_path too
    right = (*QUESTIONS, *paths, "data.answer_column=final", "data.answer_mark=null")
    assert issues(rows, *right) == []
    template = ("data.question_column=null", "data.question_template='{context} {question}'")
    assert issues(rows, *right, *template)[0].startswith("data.question_template: the first row of ")


def test_a_missing_mark_and_unreadable_lines_are_named(rows: Path) -> None:
    paths = [f"data.{name}=assets://mine/*.jsonl" for name in ("path", "eval_path")]
    (rows / "a.jsonl").write_text('{"question": "a", "answer": "4"}\n')
    assert "has no '#### ' in column 'answer'; null takes the whole column" in issues(rows, *QUESTIONS, *paths)[0]
    for line, message in (
        ("oops\n", "line 1 is not JSON"),
        ("[1]\n", r"line 1 is not an object with columns, but [1]"),
        ('{"question": "a \\ud83d", "answer": "#### 4"}\n', "line 1 has half of a surrogate pair"),
        ('{"question": "a", "answer": "4", "answer": "5"}\n', "line 1 has 'answer' more than once"),
    ):
        (rows / "a.jsonl").write_text(line)
        assert issues(rows, *QUESTIONS, *paths)[0].startswith(f"data.path: {rows}/a.jsonl: {message}")
        assert issues(rows, *QUESTIONS, *paths, "data.on_bad_line=skip") == []


def test_columns_of_text_are_those_of_the_rows(rows: Path) -> None:
    assert issues(rows, *LINES)[0].startswith("data.text_column: the first row of ")
    assert issues(rows, *LINES, "data.text_column=question") == []
    (rows / "a.jsonl").rename(rows / "lines.parquet")  # data=jsonl reads lines of JSON whatever their file's name
    assert issues(rows, *LINES, "data.text_column=question", "data.path=assets://mine/lines.parquet") == []
    (rows / "a.csv").write_text("text,label\na,b\n")
    for name, told in (("a.csv", 0), ("absent.csv", 1)):  # what is read here is told once
        made = config(*LINES, f"data.path=assets://mine/{name}", f"+assets.datasets.mine.path={rows}")
        assert len([*input_files.data_are_reachable.function(made), *first_rows_have_the_columns.function(made)]) == 1
        assert len([*input_files.data_are_reachable.function(made)]) == told
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"body": ["x"]}), rows / "a.parquet")
    change = ("data=parquet", "data.path=assets://mine/a.parquet")
    found = issues(rows, *LINES[:4], *change)
    assert found == [f"data.text_column: the first row of {rows}/a.parquet has no column 'text'; it has 'body'"]


def test_a_column_that_holds_no_text_is_named(rows: Path) -> None:
    """A number is text to the questions, and to nothing else; blank lines before the first row are skipped."""
    chat = {"messages": [{"role": "user", "content": "hi"}], "number": 4, "yes": True, "text": "hello"}
    (rows / "a.jsonl").write_text("\n  \n" + json.dumps(chat) + "\n")
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pa.table({name: [value] for name, value in chat.items()})
    parquet.write_table(table.append_column("coded", table["text"].dictionary_encode()), rows / "a.parquet")
    questions = [f"data.{name}=assets://mine/a.SUFFIX" for name in ("path", "eval_path")] + ["data.answer_mark=null"]
    grpo = (*QUESTIONS, *questions, "data.question_column=text", "data.answer_column=")
    lm = (*LINES[:4], "data=KIND", "data.path=assets://mine/a.SUFFIX", "data.text_column=")
    lists = "list<element: struct<role: string, content: string>>"
    for suffix, kind, shown in (
        ("jsonl", "jsonl", {"messages": '[{"role": "user", "content": "hi"}]', "number": "4", "yes": "true"}),
        ("parquet", "parquet", {"messages": lists, "number": "int64", "yes": "bool"}),
    ):
        for words, numbers in ((grpo, True), (lm, False)):
            for column in table.column_names + ["coded"] * (kind == "parquet"):
                made = [word.replace("SUFFIX", suffix).replace("KIND", kind) for word in words]
                found = issues(rows, *made[:-1], made[-1] + column)
                expected = [] if column in ("text", "coded") or (numbers and column == "number") else [shown[column]]
                assert [text.rpartition(f"has no text in column {column!r}, but ")[2] for text in found] == (
                    expected * (2 if numbers else 1)
                )


WORKED = {"question": "2+2?", "answer": "4", "worked": "2+2 is 4.", "rejected": "It is 5."}
OWN = ("data.answer_mark=null", "data.solution_column=worked")


@pytest.mark.parametrize(
    ("row", "words", "said"),
    [
        ({}, ("loop=sft",), []),
        ({}, ("loop.max_new_tokens=2",), []),  # nothing learns from worked responses
        ({}, ("loop=sft", "loop.max_new_tokens=11"), []),
        ({}, ("loop=sft", "loop.max_new_tokens=10", "data.chat_template=gemma"), []),
        (
            {},
            ("loop=sft", "loop.max_new_tokens=10"),
            ["error loop.max_new_tokens: the worked response of the first row"],
        ),
        ({}, ("loop.warm_start_steps=5", "loop.max_new_tokens=10"), ["error loop.max_new_tokens: the worked response"]),
        (
            {},
            ("loop=sft", "loop.max_new_tokens=10", "loop.filter_overlong_solutions=true"),
            ["warning loop.max_new_tokens: the worked response"],
        ),
        (
            {"rejected": "x" * 90},
            ("loop=dpo",),
            ["error loop.max_new_tokens: the rejected response of the first row of FILE has 92 tokens with its end, "],
        ),
        ({"rejected": "2+2 is 4."}, ("loop=dpo",), ["error data.path: the first row of FILE is no pair: its solution"]),
        (
            {"rejected": ["no"]},
            ("loop=dpo",),
            ["error loop.loss_type: the first row of FILE has no text in column 'rej"],
        ),
        (
            {"question": "x" * 60},
            (),
            ["warning loop.max_prompt_length: the first row of FILE is left out: its prompt has"],
        ),
        (
            {"answer": float("nan")},
            (),
            2 * ["error data.answer_column: the first row of FILE has no text in column 'answer'"],
        ),
        ({"answer": " "}, (), 2 * ["error data.answer_column: the first row of FILE has no answer in column 'answer'"]),
        (
            {"worked": None},
            (),
            2 * ["error data.solution_column: the first row of FILE has no text in column 'worked', bu"],
        ),
    ],
)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_what_the_trainer_leaves_out_or_refuses_is_said_of_the_first_row(
    rows: Path, row: dict[str, Any], words: tuple[str, ...], said: list[str], suffix: str
) -> None:
    file = rows / f"a.{suffix}"
    if suffix == "parquet":
        pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pa.Table.from_pylist([WORKED | row]), file)
    else:
        file.write_text(f"\n{json.dumps(WORKED | row)}\n")
    loop = next((word for word in words if word.startswith("loop=")), "loop=grpo")
    paths = [f"data.{name}=assets://mine/a.{suffix}" for name in ("path", "eval_path")]
    own = [word for word in (*QUESTIONS, *OWN, *paths, *words) if not word.startswith("loop=")]
    found = first_rows_have_the_columns(config(loop, *own, f"+assets.datasets.mine.path={rows}"))
    lines = [f"{f.severity} {f}".replace(str(file), "FILE") for f in found]
    assert [line[: len(start)] for line, start in zip(lines, said, strict=True)] == said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("data.long_documents=skip",),
            "warning data.long_documents: the first row of FILE is left out: it has 40 tokens",
        ),
        (
            ("data.long_documents=error",),
            "error data.long_documents: the first row of FILE is refused: it has 40 tokens",
        ),
        (("data.long_documents=split",), ""),
        (("data.long_documents=skip", "data.packing=stream"), ""),
        (("data.long_documents=skip", "loop.seq_len=64", "loop.total_batch_tokens=4096"), ""),
        (
            (
                "data.long_documents=skip",
                "data.text_column=null",
                "+data.template={prompt: '{text}!', answer: '{text}', remove: null}",
                "data.eos='<eos>'",
            ),
            "warning data.long_documents: the first row of FILE is left out: it has 81 tokens",
        ),
    ],
)
def test_a_first_document_that_is_too_long_is_told(rows: Path, words: tuple[str, ...], said: str) -> None:
    (rows / "a.jsonl").write_text(json.dumps({"text": "x" * 40}) + "\n")
    own = (*LINES, "data.packing=documents", "loop.seq_len=32", "loop.total_batch_tokens=4096", *words)
    found = first_rows_have_the_columns(config(*own, f"+assets.datasets.mine.path={rows}"))
    lines = [f"{f.severity} {f}".replace(str(rows / "a.jsonl"), "FILE") for f in found]
    assert [line[: len(said)] for line in lines] == ([said] if said else [])


def test_tokens_are_counted_by_a_tokenizer_that_is_here(rows: Path) -> None:
    library = pytest.importorskip("tokenizers")
    made = library.Tokenizer(library.models.WordLevel({"x": 0, "[UNK]": 1}, unk_token="[UNK]"))
    made.pre_tokenizer = library.pre_tokenizers.Whitespace()
    made.save(str(rows / "tokenizer.json"))
    row = WORKED | {"worked": "x " * 40}
    (rows / "a.jsonl").write_text(json.dumps(row) + "\n")
    paths = [f"data.{name}=assets://mine/a.jsonl" for name in ("path", "eval_path")]
    sft = (*QUESTIONS[:2], "loop=sft", *QUESTIONS[3:], *OWN, *paths, "data.tokenizer=assets://mine/tokenizer.json")
    assert issues(rows, *sft, "loop.max_new_tokens=41") == []
    [found] = issues(rows, *sft, "loop.max_new_tokens=40")
    assert "has 41 tokens with its end, and 40 fit; raise it, or set loop.filter_overlong_solutions=true" in found
    assert issues(rows, *sft[:-1], "data.tokenizer=gs://b/tokenizer.json", "loop.max_new_tokens=40") == []


@pytest.mark.parametrize("loop", ["lm", "grpo"])
@pytest.mark.parametrize(
    ("head", "said"),
    [
        (gzip.compress(b"{}", mtime=0), "is compressed by gzip: unpack it with gunzip"),
        *((head, "is text in UTF-16: save it as UTF-8") for head in ("{}".encode("utf-16"), b"\xfe\xff\0{\0}")),
        (b"\x28\xb5\x2f\xfd\x04", "is compressed by Zstandard: unpack it with unzstd"),
        (b"PK\x03\x04\x14", "is a zip archive: unpack it with unzip"),
        (b"PAR1\x15\x04", "is Parquet: read it with data=parquet"),
    ],
)
def test_compressed_data_are_named_whichever_file_they_are(rows: Path, loop: str, head: bytes, said: str) -> None:
    (rows / "a.jsonl").write_text('{"text": "x", "question": "a", "answer": "#### 4"}\n')
    (rows / "b.jsonl").write_bytes(head)
    paths = ["data.path=assets://mine/*.jsonl"] + ["data.eval_path=assets://mine/a.jsonl"] * (loop == "grpo")
    words = (*QUESTIONS, *paths) if loop == "grpo" else (*LINES[:4], "data=jsonl", *paths)
    assert issues(rows, *words, "data.on_bad_line=skip") == [
        f"data.path: {rows}/b.jsonl {said}" + (", or let its name end in .parquet" if "Parquet" in said else "")
    ]
    if loop == "lm":
        text = ("data=text", "data.path=assets://mine/b.jsonl", "data.tokenizer=bytes")
        assert issues(rows, *LINES[:4], *text)[0].startswith(f"data.path: {rows}/b.jsonl {said}")
        elsewhere = issues(rows, *LINES[:4], "data=jsonl", "data.path='gs://b/*.jsonl.gz'")
        assert elsewhere == ["data.path: gs://b/*.jsonl.gz: compressed data are not read; unpack them"]


def test_files_elsewhere_are_left_to_the_trainer(rows: Path) -> None:
    assert issues(rows, *QUESTIONS, "data.path=gs://b/a.jsonl", "data.eval_path=gs://b/b.jsonl") == []
    assert issues(rows, *QUESTIONS, f"data.path={rows}/a.jsonl", "data.eval_path=gs://b/b.jsonl") == []  # not on a pod
    here = (*QUESTIONS[1:], "cloud=local", f"data.path={rows}/a.jsonl", "data.eval_path=gs://b/b.jsonl")
    assert issues(rows, *here)[0].startswith("data.answer_column: the first row of ")
