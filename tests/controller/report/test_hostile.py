"""Names, words, metrics and transcripts are somebody else's: on the page they are text, whatever they say."""

import io
import json
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from controller.cli import main
from controller.records import index
from controller.report.gather import gather_runs, local_reader
from controller.report.model import build_report
from controller.report.page import render
from tests.controller.core.test_printable import Tty, harmless
from tests.controller.report.recorded import write_run
from tests.hostile import HOSTILE_STRINGS

MARKUP = (
    "</script><script>document.title='taken'</script>", "<img src=x onerror=alert(1)>", "</td></tr></table><h1>taken",
    '" onfocus="alert(1)" autofocus="', "' style='position:fixed", "<!-- ", "]]>", "</title><svg onload=alert(1)>",
    "&lt;b&gt;", "javascript:alert(1)", "</style><style>*{display:none}", "<a href=//evil.example>x</a>",
    "\u2028</script >",
)  # fmt: skip
WORDS = tuple(word[:300] for word in (*MARKUP, *HOSTILE_STRINGS))


class Seen(HTMLParser):
    """Tags with their attributes, and texts, as a browser takes them."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def page_of(home: Path) -> str:
    return render(build_report("sweep-1", gather_runs(index.load_rows(home), local_reader(home))), 1e9)


def with_words(home: Path, words: tuple[str, ...]) -> Path:
    """Six runs in which every text is one of them."""
    some = list(words)
    for i in range(6):
        word = some[i % len(some)]
        names = {name: 1.0 + i for name in some if name not in ("step", "phase", "time")}
        lines = [{"step": 1, "phase": word, **names}, {"step": 2, "phase": "x", "a": 1.0}]
        run = write_run(home, (f"loop.kl_coef={i / 10}",), i, 1000.0 + i, lines)
        row = dict.fromkeys(("seed", "name", "code", "commit", "state"), word) | {"metrics": dict.fromkeys(some, 1.0)}
        index.append_rows(home, [{"run": run, "overrides": ["+experiment=q", f"a={word}", f"b={i}"], **row}])
        folder = home / "runs" / run
        told = ("prompt", "response", "answer", "extracted", "reward")
        asked = [{"step": word, "phase": word, **dict.fromkeys(told, each)} for each in some]
        (folder / "transcripts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in asked))
        note = {"format": 1, "time": "2026-01-01T00:00:00Z", "kind": "note", "subject": run, "message": word}
        notes = [note | {"attempt": 1}, note | {"attempt": 1, "verdict": word}]
        (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in notes))
    return home


@pytest.fixture(scope="module")
def hostile_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return page_of(with_words(tmp_path_factory.mktemp("hostile"), WORDS))


def test_no_text_becomes_markup(tmp_path: Path, hostile_page: str) -> None:
    """As many tags, with the same attributes, as a page of plain words has, and none that could ask for something."""
    plain = Seen(page_of(with_words(tmp_path / "plain", tuple(f"word{i}" for i in range(len(WORDS))))))
    hostile = Seen(hostile_page)

    def shape(seen: Seen) -> set[tuple[str, tuple[str, ...]]]:
        return {(tag, tuple(sorted(attributes))) for tag, attributes in seen.tags}

    assert shape(hostile) <= shape(plain)
    count = {tag for tag, _ in hostile.tags}
    for tag in ("style", "link", "h1", "meta", "main", "section"):
        assert sum(t == tag for t, _ in hostile.tags) == sum(t == tag for t, _ in plain.tags), tag
    assert not count & {"img", "iframe", "object", "embed", "form", "base", "use", "image", "foreignobject"}
    for tag, attributes in hostile.tags:
        assert not [name for name in attributes if name.startswith("on") or name in ("style", "src", "srcset")], tag
        link = attributes.get("href") or ""
        assert link.startswith("#") or link in ("", "data:,")
    assert "".join(hostile.texts).count("document.title='taken'") > 10


def test_the_page_has_no_script_and_may_request_nothing(hostile_page: str) -> None:
    """All that reacts is native: links within the page, and folds, which a keyboard opens."""
    page, seen = hostile_page, Seen(hostile_page)
    names = [tag for tag, _ in seen.tags]
    assert "script" not in names
    [policy] = [a["content"] for tag, a in seen.tags if tag == "meta" and a.get("http-equiv")]
    assert policy is not None
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "url(" not in page
    assert "@import" not in page
    assert names.count("details") == names.count("summary") > 6
    assert {a["tabindex"] for _, a in seen.tags if "tabindex" in a} == {"0"}
    assert not {"input", "select", "button", "textarea"} & set(names)
    ids = {a["id"] for _, a in seen.tags if "id" in a}
    assert {a["href"] for tag, a in seen.tags if tag == "a"} <= {f"#{name}" for name in ids}


def test_no_text_forges_a_row_of_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`runs` on a terminal, and into a file whose encoding cannot hold all of it."""
    words = ("a\rFORGED\x1b[2J", "b\nFORGED\x1b]0;x\x07", "c\u202e\u2028FORGED", "d\x85FORGED", "e\ud800", "x")
    page = page_of(with_words(tmp_path / "page", ("a\x1b[2Jb\u202ec\x00d\ud800e", "x")))
    assert not {"\x1b", "\u202e", "\x00"} & set(page)
    assert r"\x1b[2Jb\u202ec\x00d\ud800e" in page
    page.encode()
    home = with_words(tmp_path / "home", words)
    monkeypatch.setenv("SLIPWAY_HOME", str(home))
    monkeypatch.chdir(tmp_path)
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    for screen in (Tty(), file):
        monkeypatch.setattr(sys, "stdout", screen)
        assert main.run(["runs"]) == 0
        screen.seek(0)
        shown = screen.read()
        assert shown.isascii() or isinstance(screen, Tty)
        assert harmless(shown)
        assert not {"\r", "\x85", "\u2028", "\ud800"} & set(shown)
        assert not [line for line in shown.splitlines() if line.startswith("FORGED")]
        runs = [row["run"] for row in index.load_rows(home)]
        assert all(run[-8:] in line for run, line in zip(runs, shown.splitlines()[1:7], strict=True))
