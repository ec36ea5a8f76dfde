"""Inputs: the files that data, weights and tokenizer name exist, and some of the data are left for validation."""

import json
import re
from collections.abc import Iterable, Iterator, Set
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from conf.schema.assets import Asset
from conf.schema.config import Config
from conf.schema.training.data import Corpus, CustomDocuments, CustomQuestions, RowData, TextData
from conf.schema.training.loop import LmLoop
from controller.config.run_yaml import ASSET
from controller.context import Context
from controller.core.finding import Issue, check
from controller.core.text import nearest_names, plural
from controller.gcp.google_errors import ForbiddenError, NotFoundError
from controller.inputs.addresses import BUILT_IN_TOKENIZERS, What, address_problem, how_to_ship
from controller.inputs.code_files import POINTERS
from controller.inputs.resolved_assets import files_below, path_exists

BUCKET = "gs://"
MISSING = "???"
"""What stands for a value that is still to be given, in Hydra's files."""
WEIGHTS = "model.weights"
FOLDERS = (WEIGHTS, "loop.teacher.weights", "model.lora.adapter")
"""Keys that name a folder of weights."""
WEIGHTS_DESCRIPTIONS = ("config.json", "model.yaml", "adapter_config.json")
"""The file of a folder of weights that the trainer reads first: Hugging Face's, `trainer.convert`'s, or PEFT's."""
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""The weights of a folder of Hugging Face in one file, or the list of the files that have them."""
CHECKPOINT_MARK = "commit_success.txt"
"""File in a complete checkpoint of a run, whose folder is the number of its step."""
MAX_LISTED = 5000
"""Objects that are compared with a pattern; beyond that, it is left unchecked."""


class Source(NamedTuple):
    """A file, pattern or folder that the bundled trainer reads, and the config key that names it."""

    key: str
    value: str


class Found(NamedTuple):
    """A file, relative to its asset or bucket; `size` in bytes, None if unknown."""

    name: str
    size: int | None


def sources(config: Config) -> Iterator[Source]:
    """Yield what the bundled trainer reads. Only the program itself knows what another program reads."""
    if config.program.kind != "trainer":
        return
    for name in ("path", "validation_path", "eval_path", "tokenizer"):
        value = getattr(config.data, name, None)
        if value and value not in (*BUILT_IN_TOKENIZERS, MISSING):
            yield Source(f"data.{name}", value)
    model, teacher = config.model, getattr(config.loop, "teacher", None)
    folders = (getattr(model, "weights", None), getattr(teacher, "weights", None))
    adapter = getattr(getattr(model, "lora", None), "adapter", None)
    named = zip(FOLDERS, (*folders, adapter), strict=True)
    yield from (Source(key, value) for key, value in named if value and value != MISSING)


@check("file_absent", "error", "data.NAME", *FOLDERS)
def files_exist_here(config: Config) -> Iterator[Issue]:
    """A name that no file of an asset or index matches fails only on a billed TPU."""
    for source in sources(config):
        there = _files_of_asset(config, source.value)
        place = source.value.rstrip("/")
        if source.key in FOLDERS and (problem := _shards_problem(config, place) or _damage(config, place)):
            yield Issue(f"{source.value}: {problem}", source.key)
        elif there is not None:
            wanted = _in_asset(source.value)
            if problem := _absence(wanted, {file.name for file in there}, source.key in FOLDERS):
                yield Issue(f"{source.value}: {problem}", source.key)
        elif config.cloud.kind in ("local", "here") and source.value.startswith("/"):
            path = Path(source.value)
            is_folder = source.key in FOLDERS and path_exists(path) and path.is_dir()
            if not is_folder and _exists(source.value):
                continue
            place = path if is_folder else path.parent
            names = {file.name for file in place.iterdir()} if path_exists(place) else set[str]()
            names = {f"{path.name}/{name}" for name in names} if is_folder else names
            if problem := _absence(path.name, names, is_folder):
                yield Issue(f"{source.value}: {problem}", source.key)


@check("object_absent", "error", "data.NAME", *FOLDERS, also="warning", live=True)
def objects_exist(config: Config, context: Context) -> Iterator[Issue]:
    """An object that is not in its bucket fails only on a billed TPU."""
    for source in sources(config):
        if not source.value.startswith(BUCKET):
            continue
        bucket, _, path = source.value.removeprefix(BUCKET).partition("/")
        try:
            problem = _object_absence(context, bucket, path, source.key in FOLDERS)
        except NotFoundError:
            problem = f"there is no bucket {bucket}"
        except ForbiddenError as error:
            message = f"{source.value} was not checked: you may not list {bucket} ({error.message})"
            yield Issue(f"{message}; the workers read it as {config.cloud.service_account}", source.key, "warning")
            continue
        if problem:
            yield Issue(f"{source.value}: {problem}", source.key)


@check("validation", "error", "data.eval_fraction", "data.eval_path", "data.validation_path", also="warning")
def validation_has_data(config: Config) -> Iterator[Issue]:
    """An evaluation without validation data ends the run, on a billed TPU."""
    data = config.data
    if isinstance(data, RowData) and data.validation_path == data.path:
        yield Issue(
            "names the training data, so evaluations measure memory; use null", "data.validation_path", "warning"
        )
    elif isinstance(data, RowData) and data.validation_path == data.eval_path and config.checkpoint.best is not None:
        message = "names the test's questions, by which checkpoint.best would choose; use null, or other questions"
        yield Issue(message, "data.validation_path", "warning")
    there = _files_of_asset(config, getattr(config.data, "path", ""))
    wanted = _in_asset(getattr(config.data, "path", ""))
    yield from _validation_issues(config, _matching(wanted, there) if there is not None else [])


@check("validation_objects", "error", "data.eval_fraction", also="warning", live=True)
def validation_has_objects(config: Config, context: Context) -> Iterator[Issue]:
    """As `validation`, for data in a bucket."""
    path = getattr(config.data, "path", "")
    if not path.startswith(BUCKET) or getattr(config.data, "eval_path", None) is not None:
        return
    bucket, _, pattern = path.removeprefix(BUCKET).partition("/")
    try:
        listed = list(islice(_iter_objects(context, bucket, _literal(pattern)), MAX_LISTED))
    except (NotFoundError, ForbiddenError):
        return  # `object_absent` reports it
    if len(listed) < MAX_LISTED:
        yield from _validation_issues(config, _matching(pattern, listed))


def _validation_issues(config: Config, files: list[Found]) -> Iterator[Issue]:
    data, loop = config.data, config.loop
    path, eval_path = getattr(data, "path", None), getattr(data, "eval_path", None)
    if config.program.kind != "trainer" or path is None:
        return
    if eval_path is not None:
        if eval_path == path:
            yield Issue(
                "names the training data, so evaluations measure memory; use others", "data.eval_path", "warning"
            )
        return
    if not isinstance(data, Corpus) or not isinstance(loop, LmLoop) or not files:
        return
    share, sizes = data.eval_fraction, [file.size for file in files]
    if isinstance(data, TextData) and data.packing == "windows":
        known = [size for size in sizes if size is not None]
        most = int(sum(known) * share)  # a token has at least one byte
        if len(known) == len(sizes) and most <= loop.seq_len:
            yield Issue(
                f"{share:g} of {sum(known)} bytes are at most {most} tokens for validation, and loop.seq_len + 1 = "
                f"{loop.seq_len + 1} are required; raise it, or set data.eval_path"
            )
    elif isinstance(data, TextData) and data.separator is None:
        if len(files) == 1:
            yield Issue("a single document cannot be divided; set data.separator, or data.eval_path and 0")
        elif len(files) * share < 1:
            message = f"{share:g} of {len(files)} documents, one per file, may be none; raise it, or set data.eval_path"
            yield Issue(message, severity="warning")


def _files_of_asset(config: Config, value: str) -> list[Found] | None:
    """Return the files of the asset that a value refers to; None if it refers to none or they are not known yet."""
    name, _, _ = value.removeprefix(ASSET).partition("/")
    assets: dict[str, Asset] = {name: asset for _, name, asset in config.assets.iter_assets()}
    if not value.startswith(ASSET) or name not in assets:
        return None
    asset = assets[name]
    if asset.files:
        return [Found(file, None) for file in asset.files]
    root = Path(asset.path).expanduser() if asset.path is not None else None
    if root is None or not path_exists(root):
        return None  # made by a command later, or reported by `asset_here`
    one = root.is_file()
    return [
        Found(root.name if one else path.relative_to(root).as_posix(), path.stat().st_size)
        for path in files_below(root)
    ]


def paths_here(config: Config, value: str) -> list[Path]:
    """Return the files on this machine that a value refers to, in the order in which the trainer reads them."""
    if value.startswith(ASSET):
        name = value.removeprefix(ASSET).partition("/")[0]
        asset = {name: asset for _, name, asset in config.assets.iter_assets()}.get(name)
        if asset is None or asset.path is None:
            return []
        root = Path(asset.path).expanduser()
        found = sorted(_matching(_in_asset(value), _files_of_asset(config, value) or []))
        return [root if root.is_file() else root / file.name for file in found]
    if config.cloud.kind not in ("local", "here") or not value.startswith("/"):
        return []
    try:
        return sorted(path for path in Path("/").glob(value.lstrip("/")) if path.is_file())
    except OSError:  # a name that is too long for a file
        return []


def _shards_problem(config: Config, folder: str) -> str:
    """Return what is wrong with the files of weights that an index on this machine names; empty if nothing is."""
    for index in paths_here(config, f"{folder}/{INDEX}"):
        try:
            named = set(json.loads(index.read_text())["weight_map"].values())
            there = {name for name in named if (index.parent / name).exists()}
        except (ValueError, KeyError, TypeError, AttributeError):
            return f"{INDEX} is not an index of shards; download it again"
        is_whole = (index.parent / WHOLE).exists()
        if missing := sorted(named - there if there or not is_whole else ()):
            return f"the shard {missing[0]}, which {INDEX} names, is missing; download the model again"
        if is_whole and there and WHOLE not in there:
            return f"has {WHOLE} and {min(there)}; remove what is not this model's"
    return ""


def _damage(config: Config, folder: str) -> str:
    """Return which file of weights on this machine is none; empty if all have what begins one."""
    for file in paths_here(config, f"{folder}/*.safetensors"):
        with file.open("rb") as stream:
            head = stream.read(max(map(len, POINTERS)))
        if head.startswith(POINTERS):
            return f"{file.name} stands for a larger file, which was not fetched; run `git lfs pull` in its folder"
        if 8 + int.from_bytes(head[:8], "little") > file.stat().st_size:  # https://huggingface.co/docs/safetensors
            return f"{file.name} has {plural(file.stat().st_size, 'byte')}, and its head needs more; download it again"
    return ""


def _exists(pattern: str) -> bool:
    try:
        return any(True for _ in Path("/").glob(pattern.lstrip("/")))
    except OSError:  # a name that is too long for a file
        return False


def _in_asset(value: str) -> str:
    return value.removeprefix(ASSET).partition("/")[2].strip("/")


def _absence(wanted: str, names: Set[str], folder: bool) -> str:
    """Return what is missing and what is there instead; empty if nothing is missing.

    Args:
        wanted: a file name, a pattern, or the name of a folder of weights.
        names: files that exist, relative to the same folder.
        folder: whether `wanted` is a folder of weights.
    """
    if folder:
        start = f"{wanted}/" if wanted else ""
        inside = {name.removeprefix(start) for name in names if name.startswith(start)}
        if not inside:
            return f"there is no such folder; {_nearest(wanted, {name.partition('/')[0] for name in names})}"
        if CHECKPOINT_MARK in inside and wanted.rpartition("/")[2].isdigit():
            return ""
        if not inside & set(WEIGHTS_DESCRIPTIONS):
            return (
                f"has neither {' nor '.join(WEIGHTS_DESCRIPTIONS)}; it has {_sample(WEIGHTS_DESCRIPTIONS[0], inside)}"
            )
        if "model.yaml" not in inside and not any(name.endswith((".safetensors", INDEX)) for name in inside):
            cure = "save it with save_pretrained(…, safe_serialization=True)"
            return f"has no safetensors; it has {_sample(WHOLE, inside)}; {cure}"
        return ""
    if wanted in names or _matching(wanted, [Found(name, None) for name in names]):
        return ""
    if not _is_pattern(wanted) and any(name.startswith(f"{wanted}/") for name in names):
        return f"is a folder; name the files in it, e.g. {wanted}/*"
    return f"no file matches it; {_nearest(wanted, names)}"


def _object_absence(context: Context, bucket: str, path: str, folder: bool) -> str:
    """Return what is missing in a bucket and what is there instead; empty if nothing is missing."""
    path = path.strip("/") if folder else path
    start = f"{path}/" if folder and path else _literal(path)
    listed = list(islice(_iter_objects(context, bucket, start), MAX_LISTED))
    if folder and listed:
        inside = {file.name.removeprefix(start) for file in listed}
        is_checkpoint = CHECKPOINT_MARK in inside and path.rpartition("/")[2].isdigit()
        return "" if is_checkpoint else _absence("", inside, folder=True)
    if len(listed) == MAX_LISTED or (problem := _absence(path, {file.name for file in listed}, folder)) == "":
        return ""
    if listed and not _is_pattern(path) and "is a folder" in problem:
        return problem
    parent = (path if folder else start).rpartition("/")[0]
    names = _entries(context, bucket, parent)
    while not names and parent:
        parent = parent.rpartition("/")[0]
        names = _entries(context, bucket, parent)
    place = f"{BUCKET}{bucket}/{parent}".removesuffix("/")
    what = "folder" if folder else "object"
    return f"no {what} matches it; {place} has {_sample(path.rpartition('/')[2], names)}"


def _entries(context: Context, bucket: str, folder: str) -> set[str]:
    """Return the first names in a folder of a bucket; those of folders end in `/`."""
    prefix = f"{folder}/" if folder else ""
    answer = context.google.call(
        "storage", "objects.list", bucket=bucket, prefix=prefix, delimiter="/", maxResults=1000
    )
    names = [*(item["name"] for item in answer.get("items", [])), *answer.get("prefixes", [])]
    return {name.removeprefix(prefix) for name in names} - {""}


def _iter_objects(context: Context, bucket: str, prefix: str) -> Iterator[Found]:
    fields = "items(name,size),nextPageToken"
    listed = context.google.list_all("storage", "objects.list", "items", bucket=bucket, prefix=prefix, fields=fields)
    return (Found(item["name"], int(item.get("size", 0))) for item in listed)


def _matching(pattern: str, files: Iterable[Found]) -> list[Found]:
    """Return the files that the trainer would read, which uses the same function of fsspec."""
    if not _is_pattern(pattern):
        return [file for file in files if file.name == pattern]
    from fsspec.utils import glob_translate

    matches = re.compile(glob_translate(pattern)).match
    return [file for file in files if matches(file.name)]


def _is_pattern(name: str) -> bool:
    return bool(set(name) & set("*?["))


def _literal(pattern: str) -> str:
    """Return the part before the first wildcard."""
    return re.split(r"[*?\[]", pattern, maxsplit=1)[0]


def _nearest(wanted: str, names: Set[str]) -> str:
    return f"nearest: {nearest_names(wanted, names)}" if names else "there is nothing"


def _sample(wanted: str, names: Set[str]) -> str:
    return nearest_names(wanted, names) or "nothing"


@check("data_path", "error", "data.NAME", *FOLDERS, also="warning")
def data_are_reachable(config: Config) -> Iterator[Issue]:
    """The program reads data and weights on the workers, which get this machine's files only as assets."""
    if config.data is None:
        return
    called = isinstance(config.data, CustomDocuments | CustomQuestions)  # the function knows what its path means
    for key, value in sources(config):
        what: What = "weights" if key in FOLDERS else "tokenizer" if key == "data.tokenizer" else "data"
        if called and what == "data":
            continue
        if value.startswith("run:") and what == "weights":
            continue  # a checkpoint
        if problem := address_problem(value, key, what, config.data.kind):
            # of a file that is here, `first_row` tells it
            is_read = what == "data" and config.data.kind != "parquet" and paths_here(config, value)
            if problem.certain or not is_read:
                yield Issue(problem.message, key, None if problem.certain else "warning")
        elif _is_only_here(config, value):
            made_there = value.startswith("/") or config.program.setup  # by an image or a command, perhaps
            yield Issue(how_to_ship(value, key, what), key, "warning" if made_there else None)


def _is_only_here(config: Config, value: str) -> bool:
    """Return whether a value is a path that the workers lack: a relative one, or with Google's VMs an absolute one."""
    if re.match(r"\w+:", value):  # gs://…, assets://…
        return False
    return not value.startswith("/") or (config.cloud.kind == "gcp" and not config.program.setup)
