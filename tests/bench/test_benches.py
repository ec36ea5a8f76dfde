"""The benches are listed, run by name and keep their table, which docs/performance.md repeats."""

import sys
from pathlib import Path

import pytest

from tests.bench import __main__ as bench
from tests.bench.growth import PARTS, exponent
from tests.paths import ROOT


def test_they_are_listed_with_what_they_measure(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([]) == 0
    said = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    files = {file.stem for file in Path(bench.__file__).parent.glob("*.py")}
    assert set(said) == files - {"__init__", "__main__", "test_benches"}
    with pytest.raises(SystemExit, match="2"):
        bench.main(["none"])


def test_one_by_name_or_all_run_and_the_table_of_a_failed_one_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, code in (("works", 0), ("fails", 3)):
        text = (
            f'"""Says a table."""\nimport sys\nprint("load\\n| a |\\n|---|")\nprint(sys.argv[1:])\nsys.exit({code})\n'
        )
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setattr(bench, "command", lambda name: [sys.executable, str(tmp_path / f"{name}.py")])
    monkeypatch.setattr(bench, "benches", lambda: {"works": "", "fails": ""})
    monkeypatch.setattr(bench, "TABLES", tables := tmp_path / "tables")
    assert bench.main(["works", "--size", "3"]) == 0
    assert (tables / "works.md").read_text() == "|a|\n|---|\n"
    assert "['--size', '3']" in capfd.readouterr().out
    assert bench.main(["--all"]) == 3
    assert [file.name for file in tables.iterdir()] == ["works.md"]


@pytest.mark.parametrize(("power", "found"), [(1, 1.0), (2, 2.0)])
def test_an_exponent_tells_linear_from_quadratic(power: int, found: float) -> None:
    assert exponent((100, 1000, 10_000), [size**power / 7 for size in (100, 1000, 10_000)]) == pytest.approx(found)


def test_the_page_has_the_table_of_the_bench() -> None:
    table = (ROOT / "tests/bench/tables/growth.md").read_text()
    assert table in (ROOT / "docs/performance.md").read_text()
    assert len(table.splitlines()) == 2 + len(PARTS)
