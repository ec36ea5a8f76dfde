"""Addresses of what the bundled trainer reads: which of data, a tokenizer and weights it cannot be, and what is meant.

The workers read Cloud Storage and their own disks, and what an asset copies there from the Hub or this machine.
"""

import re
from difflib import get_close_matches
from pathlib import Path
from typing import Literal, NamedTuple

from conf.schema.assets import HUB_NAME
from controller.core.text import nearest_names
from controller.inputs.resolved_assets import path_exists

What = Literal["data", "tokenizer", "weights"]
SCHEME = re.compile(r"(?P<scheme>[A-Za-z][\w+.-]*):(?P<slashes>/*)(?P<rest>.*)", re.DOTALL)
READ = ("gs", "gcs", "assets", "file")
"""Schemes that the workers read."""
NEAR = {"gs": "gs", "gcs": "gs", "gcp": "gs", "assets": "assets", "asset": "assets"}
"""Schemes that are meant by others, in any case and with any number of slashes."""
STORAGE_PAGES = re.compile(r"https?://storage\.(?:googleapis|cloud\.google)\.com/(?P<object>.+)")
BUILT_IN_TOKENIZERS = ("bytes", "characters")
BESIDE_TOKENIZER = frozenset(
    ["tokenizer_config.json", "config.json", "vocab.json", "special_tokens_map.json", "added_tokens.json"]
)
"""Files beside a tokenizer.json, which are no tokenizer."""
OTHER_TOKENIZERS = (".model", ".vocab", ".txt", ".bin", ".pkl", ".tiktoken", ".spm", ".py")
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".npz", ".h5", ".msgpack", ".json", ".yaml")
NO_ROWS = (
    *(".csv", ".tsv", ".xlsx", ".xls", ".arrow", ".feather", ".npy", ".npz", ".pkl", ".pt", ".h5", ".hdf5", ".orc"),
    *(".tfrecord", ".avro", ".pdf", ".docx", ".sqlite", ".db"),
)
"""Formats of tables and documents that no kind of data reads."""
TEXTS = (".jsonl", ".ndjson", ".json", ".txt", ".md")


class Problem(NamedTuple):
    """Why an address cannot be read, and whether that is certain."""

    message: str
    certain: bool = True


def address_problem(value: str, key: str, what: What, kind: str) -> Problem | None:
    """Return why the trainer cannot read an address; None if it may.

    Args:
        value: of the config.
        key: its key.
        what: what is read from there.
        kind: `data.kind`.
    """
    if value != value.strip():
        return Problem(f"{value!r} has blanks around it; remove them")
    if "\\" in value or re.match(r"[A-Za-z]:(/|$)", value):
        return Problem(f"{value} is a path of Windows; write it with / and below the current folder, or use gs://…")
    found = SCHEME.match(value)
    if found and (found["slashes"] or found["scheme"].lower() in NEAR):
        if problem := _scheme_problem(value, found, key, what):
            return Problem(problem)
    elif not found and not path_exists(Path(value).expanduser()) and (problem := _hub_problem(value, key, what)):
        return Problem(problem)
    format_problem = {"data": _data_problem, "tokenizer": _tokenizer_problem, "weights": _weights_problem}[what]
    return format_problem(value, kind)


def how_to_ship(given: str, key: str, what: What) -> str:
    """Return how to get what a path of this machine names, or the nearest that is there, to the workers."""
    value = given
    path, absent = Path(value).expanduser(), ""
    if not path_exists(path) and not set(value) & set("*?["):
        if what == "weights" and re.search(r"-[0-9a-f]{8}(-r\d+)?$", value):
            return f"{value} is no folder here; the weights of a run are {key}=run:{value}"
        siblings = {each.name for each in path.parent.iterdir()} if path.parent.is_dir() else set[str]()
        shown = {name for name in siblings if name[0] != "."}
        absent = f", nor here; {path.parent} has {nearest_names(path.name, shown) or 'nothing'}"
        near = get_close_matches(path.name, shown, n=1)
        if what == "weights" and not near and re.fullmatch(r"[\w-][\w.-]*", given, re.ASCII):
            meant = f"OWNER/{'NAME' if given == 'hf' else given}"
            on_hub = f"if it is on the Hub: {_hub_cure(meant, None, key, what)}"
            return f"{given} does not exist on the workers{absent}; {on_hub}"
        value = value.removesuffix(path.name) + near[0] if near else "FILE"
    if what == "weights":
        asset = f"assets.models.mine.path={value} {key}=assets://mine"
    else:
        asset = f"assets.datasets.mine.path={value} {key}=assets://mine/{value.rstrip('/').rpartition('/')[2]}"
    return f"{given} does not exist on the workers{absent}; make {'one' if absent else 'it'} an asset: {asset}"


def _scheme_problem(value: str, found: re.Match[str], key: str, what: What) -> str:
    """Return why an address of a scheme is not read, and what to write; empty if it is."""
    scheme, slashes, rest = found["scheme"], found["slashes"], found["rest"]
    if scheme in READ and slashes.startswith("//"):
        if scheme == "file":
            return f"{value}: write the path alone: {slashes[2:]}{rest}"
        bucket, _, inside = rest.partition("/")
        if slashes != "//" or not bucket:
            return f"{value} names no {'asset' if scheme == 'assets' else 'bucket'}; write {scheme}://NAME/FILE"
        if scheme != "assets" and not inside.strip("/"):
            return f"{value} is a whole bucket; name what is meant in it: {scheme}://{bucket}/…"
        return ""
    if (near := NEAR.get(scheme.lower())) is not None:
        return f"{value}: write {near}://{rest}"
    if page := STORAGE_PAGES.match(value):
        return f"{scheme}:// is not read; write gs://{page['object']}"
    if (page := HUB_NAME.fullmatch(value)) and "/" in page["name"]:
        return f"{value} is not read by the workers; {_hub_cure(page['name'], page['file'], key, what)}"
    cure = _hub_cure("OWNER/NAME", None, key, what)
    if scheme.lower() in ("http", "https", "ftp"):
        file = rest.partition("?")[0].rpartition("/")[2] or "FILE"
        cure = f"an asset fetches it: 'assets.datasets.mine.files={{{file}: {{url: {value}, sha256: …}}}}' "
        cure += f"{key}=assets://mine" + ("" if what == "weights" else f"/{file}")
    return f"{scheme}:// is not read; use gs://…, or an asset: {cure}"


def _hub_problem(value: str, key: str, what: What) -> str:
    """Return what to write for a name on the Hub; empty if the value is none."""
    name = value.rpartition("/")[2]
    is_file = name.endswith((".json", *TEXTS, *NO_ROWS, *OTHER_TOKENIZERS, *WEIGHT_FILES, ".parquet", ".gz", ".zst"))
    found = HUB_NAME.fullmatch(value)
    if found is None or found["name"] != value or is_file or ("/" not in value and what != "tokenizer"):
        return ""
    if what == "tokenizer" and (near := _near_words(value)):
        return f"{value} does not exist here; did you mean {near}?"
    where = {"data": "data", "tokenizer": "a tokenizer: bytes, characters or a tokenizer.json", "weights": "weights"}
    return f"{value} does not exist here and is no path of {where[what]}; if it is on the Hub: " + _hub_cure(
        value if "/" in value else f"OWNER/{value}", None, key, what
    )


def _near_words(value: str) -> str:
    """Return the tokenizer without a file that a word is probably meant to name; empty if there is none."""
    word = value.lower()
    begun = [name for name in BUILT_IN_TOKENIZERS if len(word) > 2 and name.startswith(word)]
    return next(iter(begun or get_close_matches(word, BUILT_IN_TOKENIZERS, n=1, cutoff=0.8)), "")


def _hub_cure(repository: str, file: str | None, key: str, what: What) -> str:
    if what == "tokenizer":
        named = file or "tokenizer.json"
        source = f"assets.tokenizers.t.source=hf://{repository}/{named}"
        return f"{source} {key}=assets://t/{named.rpartition('/')[2]}"
    if what == "data":
        wanted = f"/{file}" if file else ""
        return f"assets.datasets.mine.source=hf://datasets/{repository}{wanted} {key}=assets://mine/{_last(file)}"
    if key == "model.weights":
        return f"{key}=hf://{repository}"
    return f"assets.models.mine.source=hf://{repository} {key}=assets://mine"


def _last(file: str | None) -> str:
    return file.rpartition("/")[2] if file else "FILE"


def _tokenizer_problem(value: str, kind: str) -> Problem | None:
    del kind
    name, path = value.rpartition("/")[2], Path(value).expanduser()
    if name in BESIDE_TOKENIZER:
        return Problem(f"{value} is not the tokenizer; name the tokenizer.json beside it")
    if name.endswith(OTHER_TOKENIZERS):
        made = "a tokenizer.json of Hugging Face's library, as AutoTokenizer.from_pretrained(…).save_pretrained writes"
        return Problem(f"{value} is none of bytes, characters or a tokenizer.json; name {made}")
    if path_exists(path) and path.is_dir():
        return Problem(f"{value} is a folder; name the file in it: {value.rstrip('/')}/tokenizer.json")
    if "://" in value and "." not in name:
        return Problem(
            f"{value} is no tokenizer.json; if it is a folder, name {value.rstrip('/')}/tokenizer.json", False
        )
    return None


def _weights_problem(value: str, kind: str) -> Problem | None:
    del kind
    name = value.rpartition("/")[2]
    if name.endswith(WEIGHT_FILES):
        folder = value.removesuffix(name).rstrip("/")
        return Problem(f"{value} is a file, and weights are a folder{f': {folder}' if folder else ''}")
    return None


def _data_problem(value: str, kind: str) -> Problem | None:
    name, path = value.lower(), Path(value).expanduser()
    if "," in value and not path_exists(path):
        return Problem(f"{value} is one path; * and ** match several files, such as folder/*.jsonl")
    if kind == "puzzles":
        folder = value.rpartition("/")[0]
        return Problem(f"{value} is a file; name its folder: {folder}") if name.endswith(".json") else None
    if path_exists(path) and path.is_dir():
        return Problem(f"{value} is a folder; name the files in it, e.g. {value.rstrip('/')}/*")
    if name.endswith(NO_ROWS) and not (kind == "text" and name.endswith((".csv", ".tsv"))):
        return Problem(f"{value}: data.kind={kind} does not read this format; write it as JSON lines or Parquet", False)
    if kind == "parquet" and name.endswith(TEXTS):
        return Problem(f"{value} is no Parquet by its name; set data=jsonl, or data=text", False)
    if kind in ("jsonl", "text") and name.endswith(".parquet"):
        return Problem(f"{value} is Parquet by its name; set data=parquet", False)
    return None
