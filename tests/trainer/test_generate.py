"""`trainer.generate` and `trainer.chat` on a small policy: the run's wording, the sampler's settings, clear errors."""

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.policy.conftest import MakeCheckpoint, make_checkpoint
from trainer import chat, generate
from trainer.policy.policy import Policy
from trainer.sampler import LogitsError

__all__ = ["make_checkpoint"]


@pytest.fixture
def checkpoint(grpo_run: dict[str, Any], make_checkpoint: MakeCheckpoint) -> Path:
    return make_checkpoint(grpo_run)


def test_prompts_of_a_file_are_answered_in_their_order(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked, out = tmp_path / "asked.jsonl", tmp_path / "said.jsonl"
    asked.write_text('{"question": "1 + 1?"}\n\n{"question": "2 + 2?"}\n')
    words = [str(checkpoint), "--prompts", str(asked), "--column", "question", "--out", str(out), "-n", "3"]
    assert generate.main([*words, "--temperature", "0", "--max-new-tokens", "4"]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["prompt"], row["sample"]) for row in rows] == [(f"{i} + {i}?", n) for i in (1, 2) for n in range(3)]
    assert rows[0]["text"] == rows[2]["text"], "greedy"
    assert generate.main([str(checkpoint), "--prompt", "2 + 2?", "--temperature", "0", "--max-new-tokens", "4"]) == 0
    assert capsys.readouterr().out == rows[3]["text"] + "\n"
    words = [str(checkpoint), "--prompt", "2 + 2?", "--temperature", "0", "--max-new-tokens", "4", "--min-p", "0.5"]
    assert generate.main([*words, "--repetition-penalty", "100", "--presence-penalty=-0.5"]) == 0
    assert capsys.readouterr().out != rows[3]["text"] + "\n", "no byte of the prompt, none twice"
    with pytest.MonkeyPatch.context() as patch:  # what streams is what is drawn
        patch.setattr("sys.stdin", io.StringIO("2 + 2?\n/quit\n"))
        assert chat.main([str(checkpoint), "--temperature", "0", "--max-new-tokens", "4"]) == 0
    said, told = capsys.readouterr()
    assert said == rows[3]["text"] + "\n"
    assert told.startswith("each line is a question of its own, worded as in the run's training")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompt", ""], ""),
        (["--prompts", "{absent}"], "absent.jsonl does not exist"),
        (["--prompts", "{asked}"], "asked.jsonl, line 2 is not JSON"),
        (["--prompts", "{other}"], "line 1 has no text under the key 'prompt'; it has text; set --column"),
        (["--prompts", "{empty}"], "empty.jsonl is empty"),
        (["--prompts", "{missing}"], "line 1 has no text under the key 'prompt'; it has prompt"),
        (["--prompts", "{half}"], "line 1 has half of a surrogate pair, which is no character, in column 'prompt'"),
        (["--prompts", "{packed}"], "packed.jsonl is compressed by gzip: unpack it with gunzip"),
        (["--prompt", "x", "--max-new-tokens", "8192"], "exceeds model.max_seq_len, 8192"),
        (["--prompt", "x", "--tokenizer", "nowhere"], "nowhere: there is no tokenizer"),
    ],
)
def test_what_cannot_be_answered_is_one_line(
    checkpoint: Path, words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    contents = {"asked": b'{"prompt": "x"}\n{', "other": b'{"text": "x"}', "empty": b"\n"}
    contents |= {
        "missing": b'{"prompt": NaN}',
        "half": b'{"prompt": "\\ud83d"}',
        "packed": gzip.compress(b'{"prompt": "x"}'),
    }
    files = {name: tmp_path / f"{name}.jsonl" for name in ("absent", *contents)}
    for name, content in contents.items():
        files[name].write_bytes(content)
    given = [word.format(**files) for word in words]
    code = generate.main(
        [str(checkpoint), *given, *(["--max-new-tokens", "2"] if "--max-new-tokens" not in words else [])]
    )
    said = capsys.readouterr().err
    assert (code, message in said, said.count("\n")) == ((2, True, 1) if message else (0, True, 0)), said


@pytest.mark.parametrize(
    "words",
    [["--repetition-penalty", "0"], ["--presence-penalty=-3"], ["--min-p", "0"], ["--temperature", "-1"],
     ["--frequency-penalty", "nan"]],
    ids=str,
)  # fmt: skip
def test_numbers_out_of_bounds_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        generate.main(["folder", "--prompt", "x", *words])
    assert words[0].partition("=")[0] in capsys.readouterr().err


def test_a_folder_without_weights_is_one_line(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reasons = {"": "choose one: ", "nowhere": "there is no such folder", "tokenizer": "it has neither config.json nor"}
    for folder, message in reasons.items():
        for program, more in ((generate.main, ["--prompt", "x"]), (chat.main, [])):
            assert program([str(checkpoint.parents[1] / folder), *more]) == 2
            said = capsys.readouterr().err
            assert message in said
            assert said.count("\n") == 1


def test_weights_that_give_no_logits_are_one_line(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def generate_nothing(*_: Any, **__: Any) -> None:
        raise LogitsError("the model's logits are not finite")

    monkeypatch.setattr(Policy, "generate", generate_nothing)
    monkeypatch.setattr("sys.stdin", io.StringIO("2 + 2?\n"))
    for program, more in ((generate.main, ["--prompt", "x"]), (chat.main, [])):
        assert program([str(checkpoint), *more]) == 2
        assert capsys.readouterr().err.splitlines()[-1] == "the model's logits are not finite"
