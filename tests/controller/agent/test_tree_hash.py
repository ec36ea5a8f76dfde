from pathlib import Path

import pytest

from controller.agent.tree_hash import current_tree_hash, tree_files, tree_hash


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("a/b.py", "a/c.py", "d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


@pytest.mark.parametrize(
    "alter",
    [
        lambda tree: (tree / "a/b.py").write_text("a/b.pz"),
        lambda tree: (tree / "a/b.py").rename(tree / "a/e.py"),
        lambda tree: (tree / "a/b.py").chmod(0o700),
        lambda tree: (tree / "new").write_text(""),
        lambda tree: (tree / "d.txt").unlink(),
        lambda tree: (tree / "link").symlink_to("d.txt"),
        lambda tree: (tree / "folder").symlink_to("a", target_is_directory=True),
    ],
    ids=["byte", "name", "executable", "added", "removed", "link", "linked folder"],
)
def test_every_alteration_shows(tree: Path, alter) -> None:
    before = tree_hash(tree)
    alter(tree)
    assert tree_hash(tree) != before


@pytest.mark.parametrize("swap", [("a/b.py", "a/c.py"), ("a/b.py", "d.txt")])
def test_contents_belong_to_their_names(tree: Path, swap: tuple[str, str]) -> None:
    before = tree_hash(tree)
    first, second = (tree / name for name in swap)
    texts = first.read_text(), second.read_text()
    first.write_text(texts[1])
    second.write_text(texts[0])
    assert tree_hash(tree) != before


def test_what_python_caches_and_who_may_read_do_not_count(tree: Path) -> None:
    before = tree_hash(tree)
    (tree / "a/__pycache__").mkdir()
    (tree / "a/__pycache__/b.pyc").write_bytes(b"1")
    (tree / "d.txt").chmod(0o600)
    (tree / "empty").mkdir()
    assert tree_hash(tree) == before


def test_a_choice_of_files_hashes_like_a_tree_of_just_them(
    tree: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    (other / "d.txt").write_text("d.txt")
    assert tree_hash(tree, ["d.txt"]) == tree_hash(other)
    assert tree_hash(tree, reversed(tree_files(tree))) == current_tree_hash(tree) == tree_hash(tree)
    assert current_tree_hash(other / "nothing") is None
