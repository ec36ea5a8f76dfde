"""Names of objects that are not written: what tools obey, however a file system may let it be spelled."""

import unicodedata

import pytest

from controller.records.local_names import ASIDE, OBEYED_AT_THE_TOP, name_problem, split_names

READ_ANYWHERE = (
    ".git", ".hg", ".svn", ".bzr", ".jj", ".envrc", ".env", ".env.local", ".vscode", ".idea", ".vs", ".zed",
    ".fleet", ".cursor", ".devcontainer", ".python-version",
    ".tool-versions", ".mise.toml", ".nvmrc", ".vimrc", ".exrc", ".nvim.lua", ".lvimrc", ".dir-locals.el",
    ".bashrc", ".profile", ".zshenv", ".inputrc",
    ".ssh", ".config", ".netrc", ".npmrc", ".pypirc", ".gitattributes", ".gitmodules", ".gitignore", ".gitconfig",
    ".pre-commit-config.yaml",
    ".pdbrc", ".ipython", ".pth", ".autoenv", ".direnv", ".husky", ".github", ".htaccess", ".pylintrc",
    ".coveragerc", ".flake8", ".pytest.ini",
    "conftest.py", "sitecustomize.py", "usercustomize.py", "pyvenv.cfg", "hydra_plugins", "AGENTS.md", "a.pth",
    "a.desktop", "a.lnk", "test_it.py", "it_test.py", "CLAUDE.md", "a.library-ms", "x.code-workspace", "HEAD",
)  # fmt: skip
READ_AT_THE_TOP = (
    *OBEYED_AT_THE_TOP, "setup.py", "noxfile.py", "tasks.py", "json.py", "readline.py", "rlcompleter.so",
    "code.pyc", "slipway", "numpy.py", "jax.cpython-311-x86_64-linux-gnu.so", "torch.pyc", "__main__.py",
    "gunicorn.conf.py", "jupyter_notebook_config.py", "train.py",
)  # fmt: skip
WRITTEN = (
    "result.json", "logs/attempt-1/worker-0.log", "checkpoints/3/state/d/0123", "checkpoints/3/_CHECKPOINT_METADATA",
    "tb/events.out.tfevents.1.host.2.0", ".hydra/config.yaml", "checkpoints/3/x/.zarray", "torch/.metadata",
    "code/pyproject.toml", "a/json.py", "code/train.py", "head/kernel/.zarray", "plots/10:30.png", "a b/ü.txt",
    "plan.yaml",
    "a..b", "git", "gitlab", "console.txt", "commit.txt", "日本.txt", "token/1", "trainer/metrics.json",
    "wandb/run-1/files/config.yaml", "numpy/x.npy",
    "a/matplotlibrc", "builds/x", "build/x.txt", "workspace/x.csv", "a/test.py", "test_loss.txt",
    "Makefile", "GNUmakefile", "justfile", "package.json", "shell.nix", "flake.nix", "Pipfile", "BUILD.bazel",
    "Dockerfile", "compose.yaml", "Snakefile", "meson.build", "go.mod", "uv.lock", "ruff.toml",
)  # fmt: skip


def spelled(name: str) -> list[str]:
    """The name as file systems without case, with other forms of letters, or with streams may take it."""
    wide = "".join(chr(ord(c) + 0xFEE0) if "a" <= c <= "z" else c for c in name)
    return [name, name.upper(), name.title(), wide, f"{name}.", f"{name} ", f"{name}::$INDEX_ALLOCATION",
            unicodedata.normalize("NFD", name)]  # fmt: skip


@pytest.mark.parametrize("name", sorted(READ_ANYWHERE))
def test_what_tools_find_by_themselves_is_not_written_anywhere(name: str) -> None:
    for spelling in spelled(name):
        for path in (spelling, f"sub/{spelling}", f"a/b/{spelling}"):
            assert name_problem(path), path
    if name != "HEAD" and "." not in name[1:]:
        assert name_problem(f"{name}/config")
        assert name_problem(f"a/{name}/hooks/x")


@pytest.mark.parametrize("name", sorted(READ_AT_THE_TOP))
def test_what_tools_read_where_they_start_is_not_written_at_the_top(name: str) -> None:
    for spelling in spelled(name):
        assert name_problem(spelling), spelling
        kept, refused = split_names([spelling, "a/b"])
        assert (kept, refused) == ({spelling: f"{ASIDE}/{spelling}", "a/b": "a/b"}, {}), spelling
        assert name_problem(kept[spelling]) == ""


@pytest.mark.parametrize(
    ("paths", "places"),
    [
        (["pkg/__init__.py", "pkg/a.py"], ["top-level/pkg/__init__.py", "pkg/a.py"]),
        (["wandb/settings", "slipway/x.yaml"], ["top-level/wandb/settings", "top-level/slipway/x.yaml"]),
        (["train.py", "top-level/train.py"], [None, "top-level/train.py"]),
        (["train.py", "top-level"], ["top-level/train.py", None]),
        (["__init__.py", "train.py/x"], [None, "train.py/x"]),
        ([".git/x.py", "conftest.py", "x\0.py", "-x.py", "con.py"], [None] * 5),
    ],
)
def test_what_does_harm_at_the_top_alone_is_put_aside(paths: list[str], places: list[str | None]) -> None:
    kept, refused = split_names(paths)
    assert [kept.get(path) for path in paths] == places
    assert refused.keys() == set(paths) - kept.keys()


@pytest.mark.parametrize(
    "path",
    [
        "", ".", "..", "../x", "a/../../x", "a/..", "/etc/passwd", "//x", "a//b", "./a", "a/./b", "a\\..\\b", "a\0b",
        "a\nb", "\x1b[31m", "a\u202eb", "a\u200bb", ".g\u200cit/config", "a\u2028b", "\ud800", "CON", "nul.txt",
        "a/com1", "LPT9.log", "aux .txt", "-rf", "a/--checkpoint-action=exec=sh x", "git~1/config", "GIT~2", "x" * 201,
        "é" * 101, "a/" * 1200 + "b", "json/__init__.py", "typing/__init__.pyc", "numpy/__init__.py",
        "jax/__init__.pyc", "wandb/settings",
        "WandB/Settings.", "slipway/mine.yaml", "profile_default/startup/x",
    ],
)  # fmt: skip
def test_what_is_no_name_of_a_file_here_is_not_written(path: str) -> None:
    assert name_problem(path)


def test_results_are_written_and_one_bad_name_takes_nothing_with_it() -> None:
    assert {path: name_problem(path) for path in WRITTEN if name_problem(path)} == {}
    kept, refused = split_names([*WRITTEN, ".git/config", "logs", "../x"])
    assert kept == {path: path for path in WRITTEN}
    assert sorted(refused) == ["../x", ".git/config", "logs"]
    assert refused["logs"] == "is also the folder of other files"


def test_what_slipway_itself_writes_is_never_refused() -> None:
    names = ("record.json", "run.yaml", "plan.yaml", "git.json", "diff.patch", "events/0a1b2c3d.jsonl", "lease.json",
             "requests/0a1b2c3d.jsonl", "metrics.jsonl", "transcripts.jsonl", "summary.json", "scores.json",
             "alerts.json",
             "launches/1.json", "exit/worker-0-attempt-1.json", "tokenizer/tokenizer.json",
             "checkpoints/3/commit_success.txt",
             "checkpoints/3/state/manifest.ocdbt", "checkpoints/3/state/ocdbt.process_0/d/0f",
             "compile_cache/jit_f-1-cache",
             "stacks/worker-0.txt", "model.safetensors", "config.json", "chat_template.jinja")  # fmt: skip
    assert {name: name_problem(name) for name in names if name_problem(name)} == {}
