"""Text for people: made safe to print, fitted to the width of a terminal, and formatted; and lines about metrics.

Escape sequences in the output of workers could hide text, set the title, or answer as if it had been typed.
Bidirectional characters can reorder text: https://unicode.org/reports/tr36/

A terminal has 80 columns unless its user makes it wider, so what tells rows apart must fit in 80.
"""

import difflib
import io
import math
import os
import re
import sys
import textwrap
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Bidirectional characters, separators of lines, halves of surrogate pairs, and control characters except tab, newline
and carriage return (for progress bars)."""


def printable(text: str) -> str:
    r"""Return the text without colours, with other control characters escaped as `\x1b`."""
    return CONTROL_CHARACTERS.sub(lambda found: ascii(found[0])[1:-1], COLOUR.sub("", text))


def one_line(text: str) -> str:
    r"""Return the text as a cell of a table: all that does not print, a line break too, escaped as `\n`."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class SanitizedStream:
    """Terminal stream that escapes control characters."""

    def __init__(self, stream: Any) -> None:
        self.unsanitized = stream
        """The original stream, for code that draws on the terminal."""

    def write(self, text: str) -> int:
        self.unsanitized.write(printable(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unsanitized, name)


def unsanitized_stream(stream: Any) -> Any:
    """Return the stream for code that draws on the terminal and escapes foreign text itself."""
    return stream.unsanitized if isinstance(stream, SanitizedStream) else stream


@contextmanager
def sanitized_output() -> Iterator[None]:
    """Sanitize stdout and stderr inside the block where they are terminals; a file gets what it cannot hold escaped."""
    before = sys.stdout, sys.stderr
    with Path(os.devnull).open("w") as nowhere:
        streams = [stream if stream is not None else nowhere for stream in before]  # None: closed by `>&-`
        for stream in streams:
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        sys.stdout, sys.stderr = (SanitizedStream(stream) if stream.isatty() else stream for stream in streams)
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before


DEFAULT_WIDTH = 80
GAP = "  "
"""Between two columns of a table."""
MIN_FOLDED = 30
"""Columns to which a folded column may shrink before others are left out."""
Concession = tuple[str, Sequence[str] | None]
"""A column and the shorter cells that it may have, or None if it may be left out."""


def width_of(stream: Any) -> int | None:
    """Return the columns of a terminal, or what $COLUMNS says; None for a file or pipe, where lines stay whole."""
    given = os.environ.get("COLUMNS", "")
    if given.isdigit() and int(given):
        return int(given)
    if not stream.isatty():
        return None
    try:
        return os.get_terminal_size(stream.fileno()).columns or DEFAULT_WIDTH
    except (OSError, ValueError):  # it says that it is a terminal, but has no size
        return DEFAULT_WIDTH


def cell_width(text: str) -> int:
    """Return the columns that a text occupies: wide East Asian characters take two, combining ones none."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(sign) else 2 if unicodedata.east_asian_width(sign) in "WF" else 1 for sign in text
    )


def pad(text: str, width: int) -> str:
    return text + " " * max(0, width - cell_width(text))


def shorten(text: str, width: int) -> str:
    """Shorten a text to a width with an ellipsis before its last third: names often differ at their end."""
    if cell_width(text) <= width:
        return text
    end = _tail(text, max(0, (width - 1) // 3))
    start = _head(text, max(0, width - 1 - cell_width(end)))
    return f"{start}…{end}"


def wrap(text: str, width: int | None, indent: int = 0) -> str:
    """Wrap each line between words; further lines are indented. A word that is too long, such as a URL, stays whole."""
    if width is None:
        return text
    lines = [
        textwrap.wrap(
            line,
            max(width, indent + 20),
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
            drop_whitespace=True,
            replace_whitespace=False,
        )
        or [""]
        for line in text.splitlines()
    ]
    return "\n".join(part for line in lines for part in line)


def print_wrapped(lines: Iterable[str], indent: int = 2) -> None:
    """Print lines, wrapped to the width of the terminal."""
    width = width_of(sys.stdout)
    print("\n".join(wrap(line, width, indent) for line in lines))


def join_fitting(first: str, optional: Sequence[tuple[int, str]], width: int | None) -> str:
    """Join parts in their order; where there is no room, those of the highest rank are left out first.

    Args:
        first: the beginning of the line, which is always shown.
        optional: rank and text of each part; rank 0 is always shown.
        width: the columns of the line.
    """
    shown = [(rank, text) for rank, text in optional if text]
    while True:
        line = GAP.join([first, *(text for _, text in shown)])
        last = max((rank for rank, _ in shown), default=0)
        if width is None or cell_width(line) <= width or last == 0:
            return line
        index = max(i for i, (rank, _) in enumerate(shown) if rank == last)
        del shown[index]


def fit_table(
    columns: Mapping[str, Sequence[str]], width: int | None, concessions: Iterable[Concession] = (), folded: str = ""
) -> tuple[list[str], list[list[str]], list[str]]:
    """Lay out a table, and make concessions in order until it fits.

    Args:
        columns: cells by title; a name of a metric, say, may be any text, so each is shown on one line.
        width: columns of the terminal; None: unlimited.
        concessions: what may become shorter or be left out, the least important first.
        folded: title of the column whose cells are folded onto further lines, of MIN_FOLDED columns if need be, before
            a column is left out.

    Returns:
        The titles, the rows of padded cells (a folded cell makes several rows), and the titles that were left out.
    """
    shown = {one_line(title): [one_line(cell) for cell in cells] for title, cells in columns.items()}
    left_out: list[str] = []
    for title, shorter in ((one_line(title), cells) for title, cells in concessions):
        if width is None or _table_width(shown, folded if shorter is None else "") <= width:
            break
        if title not in shown:
            continue
        if shorter is None:
            del shown[title]
            left_out.append(title)
        else:
            shown[title] = [one_line(cell) for cell in shorter]
    if width is not None and folded in shown and (over := _table_width(shown) - width) > 0:
        room = max(12, max(map(cell_width, [folded, *shown[folded]])) - over)
        shown = _fold(shown, folded, room)
    widths = {title: max(map(cell_width, [title, *cells])) for title, cells in shown.items()}
    titles = [pad(title, widths[title]) for title in shown]
    rows = [
        [pad(cell, widths[title]) for title, cell in zip(shown, row, strict=True)]
        for row in zip(*shown.values(), strict=True)
    ]
    return titles, rows, left_out


def _table_width(columns: Mapping[str, Sequence[str]], folded: str = "") -> int:
    """Return the width of a table, with one column as narrow as it is folded at most."""
    widths = {title: max(map(cell_width, [title, *cells])) for title, cells in columns.items()}
    if folded in widths:
        widths[folded] = min(widths[folded], MIN_FOLDED)
    return sum(widths.values()) + len(GAP) * (len(widths) - 1)


def _fold(columns: Mapping[str, Sequence[str]], folded: str, room: int) -> dict[str, list[str]]:
    """Break the cells of one column between words, or within a word that is too long; the other cells stay on top."""
    made: dict[str, list[str]] = {title: [] for title in columns}
    for i, cell in enumerate(columns[folded]):
        parts = textwrap.wrap(cell, room, break_on_hyphens=False) or [""]
        for title, cells in columns.items():
            made[title] += parts if title == folded else [cells[i], *[""] * (len(parts) - 1)]
    return made


def _head(text: str, width: int) -> str:
    while cell_width(text) > width:
        text = text[:-1]
    return text


def _tail(text: str, width: int) -> str:
    while cell_width(text) > width:
        text = text[1:]
    return text


MAX_ID_WIDTH = 26
"""Width of an id on a narrow terminal, if the names of the runs differ."""


def is_folder(bucket: str) -> bool:
    """Return whether a bucket is a folder of this machine, as for `cloud=here`."""
    return bucket.startswith("/")


def object_url(bucket: str, name: str = "") -> str:
    """Return where an object is: `gs://BUCKET/NAME`, or its path if the bucket is a folder."""
    base = bucket if is_folder(bucket) else f"gs://{bucket}"
    return f"{base}/{name}" if name else base


def plural(number: int, noun: str) -> str:
    """Return a number with its noun: `1 worker`, `4 workers`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def nearest_names(wanted: str, names: Set[str]) -> str:
    """Return up to four of the names, those that resemble the wanted one if any do; empty if there are none."""
    return ", ".join(difflib.get_close_matches(wanted, sorted(names), n=4, cutoff=0.3) or sorted(names)[:4])


def short_ids(ids: Sequence[str]) -> list[str]:
    """Return what differs between the ids: their hashes alone if all have the same name, else also the name's start."""
    names = {run.rpartition("-")[0] for run in ids}
    return [run.rpartition("-")[2] if len(names) == 1 else shorten(run, MAX_ID_WIDTH) for run in ids]


def short_overrides(titles: Sequence[str]) -> list[str]:
    """Shorten `optimizer.lr=1e-4` to `lr=1e-4`, unless two keys would be called the same."""
    keys = {word.partition("=")[0].lstrip("'") for title in titles for word in title.split(" ") if "=" in word}
    ends = [key.rpartition(".")[2] for key in keys]
    unique = {key: end for key, end in zip(keys, ends, strict=True) if ends.count(end) == 1}

    def short(word: str) -> str:
        quoted, equals, value = word.partition("=")
        key = quoted.lstrip("'")
        return f"{quoted.removesuffix(key)}{unique.get(key, key)}={value}" if equals else word

    return [" ".join(map(short, title.split(" "))) for title in titles]


MAX_NUMBER = 1e15
"""Upper limit for step counts and seconds; JSON numbers are unbounded."""
SHOWN_METRICS = ("loss", "accuracy", "exact_accuracy", "reward_mean", "pass_at_k", "entropy", "kl")
RANKS = {
    "accuracy": 1, "exact_accuracy": 1, "reward_mean": 2, "tok/s": 3, "loss": 4, "pass_at_k": 5, "kl": 6, "entropy": 7,
}  # fmt: skip
"""The highest rank is left out first where the line has no room; step and ETA always stay."""
BESIDE_OTHERS = re.compile(r"(^|_)(low|high|stderr)(_|$)|^(eval_prompts|eval_puzzles|steps|warm_start_steps)$")
"""Bounds of an interval, which are shown beside their value, and numbers that the config says."""
RESULT_NAME_WIDTH = 18
MAX_SHOWN, MAX_LINE = 80, 2000
"""Characters of one name or value, and of the metrics of a line: a program may write anything as either."""


def training_line(metrics: dict[str, Any], usd_per_hour: float | None = None, width: int | None = None) -> str | None:
    """Format `step 120/700  loss 0.12  accuracy 0.61  1.2k tok/s  ETA 1:32, $0.65`; None for a line without a step.

    The dollars are the remaining cost, shown if the hourly price of the pod is known. Where the line is wider than
    `width`, the least important metrics are left out.
    """
    metrics = {name: value for name, value in metrics.items() if isinstance(value, str | int | float)}
    step, total, seconds = (numeric(metrics.get(name)) for name in ("step", "steps_total", "step_time"))
    if step is None:
        return None
    first = f"{_cut(str(metrics.get('phase', '')))} step {step}{f'/{total:.0f}' if total else ''}".strip()
    values = {name: metrics[name] for name in SHOWN_METRICS if metrics.get(name) is not None}
    if "accuracy" not in values and "reward_mean" not in values and "loss" in values:
        ranks = RANKS | {"loss": 1}
    else:
        ranks = RANKS
    parts = [(ranks[name], f"{name} {format_number(value)}") for name, value in values.items()]
    if numeric(metrics.get("tokens_per_second")):
        parts.append((ranks["tok/s"], f"{format_number(metrics['tokens_per_second'])} tok/s"))
    if numeric(metrics.get("examples_per_second")):
        parts.append((ranks["tok/s"], f"{format_number(metrics['examples_per_second'])} examples/s"))
    if total and seconds:
        left = max(0.0, total - step) * seconds
        dollars = f", ${left / 3600 * usd_per_hour:,.2f}" if usd_per_hour else ""
        parts.append((0, f"ETA {format_duration(left)}{dollars}"))
    return join_fitting(first, parts, width)


def evaluation_line(metrics: dict[str, Any]) -> str:
    """Format `step 188  accuracy 0.8984 (95 %: 0.8553 to 0.9297)`: the metrics of an evaluation, no parts."""
    values = {name.removeprefix("eval_"): value for name, value in metrics.items() if name.startswith("eval_")}
    values.pop("time", None)
    shown = []
    for name, value in values.items():
        if "/" not in name and not _is_bound(values, name):
            shown.append(f"{_cut(name)} {format_number(value)}{_interval(values, f'{name}_low', f'{name}_high')}")
    return "  ".join([f"step {numeric(metrics.get('step'))}", *([_cut("  ".join(shown), MAX_LINE)] if shown else [])])


def result_lines(summary: Mapping[str, Any], width: int | None = None) -> list[str]:
    """Format the content of summary.json: before and after on one line with the interval, then the other values.

    `X_before` and `X_after` make one line; `X_low_after` and `X_high_after` are its 95% interval. Numbers without a
    counterpart share lines, in the order in which the program gave them. If nothing has a before and after, each value
    has its line, with `X_low` and `X_high` as its interval.
    """
    main, others = result_values(summary)
    lines = [f"{pad(_cut(name), RESULT_NAME_WIDTH)} {text}" for name, text in main.items()]
    rest = "  ".join(f"{_cut(name)} {text}".replace(" ", "\0") for name, text in others.items())
    return [*lines, *wrap(rest, width).replace("\0", " ").splitlines()]


def result_values(summary: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the results that have a line each, as `result_lines` says, and the others, as texts by name."""
    main, others = dict[str, str](), dict[str, str]()
    for name, value in summary.items():
        base = name.removesuffix("_after")
        if name.endswith("_after") and f"{base}_before" in summary and not BESIDE_OTHERS.search(base):
            interval = _interval(summary, f"{base}_low_after", f"{base}_high_after")
            main[base] = f"{format_number(summary[f'{base}_before'])} → {format_number(value)}{interval}"
        elif name.endswith("_before") and f"{name.removesuffix('_before')}_after" in summary:
            continue  # the line of `X_after` shows it
        elif not BESIDE_OTHERS.search(name):
            others[name] = format_number(value)
    if main:
        return main, others
    shown = {name: format_number(value) for name, value in summary.items() if not _is_bound(summary, name)}
    return {name: text + _interval(summary, f"{name}_low", f"{name}_high") for name, text in shown.items()}, {}


def _is_bound(values: Mapping[str, Any], name: str) -> bool:
    """Return whether a value is a bound of another's interval, or its standard error: `X_low` beside `X`."""
    base = name.rpartition("_")[0]
    return name.endswith(("_low", "_high", "_stderr")) and {base, f"{base}_low", f"{base}_high"} <= values.keys()


def _cut(text: str, length: int = MAX_SHOWN) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"


def _interval(values: Mapping[str, Any], low: str, high: str) -> str:
    told = {low, high} <= values.keys()
    return f" (95 %: {format_number(values[low])} to {format_number(values[high])})" if told else ""


def numeric(value: Any) -> int | float | None:
    """Return the value if it is a number: a program may write anything as its metrics."""
    return value if isinstance(value, int | float) and abs(value) < MAX_NUMBER else None


def finite_number(value: Any) -> float | None:
    """Return a finite float, or None for anything else; JSON numbers have no upper limit."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def format_number(value: Any) -> str:
    if not isinstance(value, float):
        return _cut(str(value))
    is_whole = value.is_integer() or abs(value) >= 1000
    return f"{value:,.0f}" if is_whole and abs(value) < MAX_NUMBER else f"{value:.4g}"


def format_duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"
