"""Draw responses from a policy on this machine.

    python -m trainer.generate FOLDER --prompt 'Question' [-n 4] [--temperature 0]
    python -m trainer.generate FOLDER --prompts questions.jsonl --out responses.jsonl

FOLDER is a checkpoint of a run, RUN/checkpoints/STEP, or a folder of exported weights. A prompt is worded as in the
run's training: chat template, system message, shots. Each line of a .jsonl file is an object with the key `prompt`; the
lines of the output have `prompt`, `sample`, `text` and `finished`, which is false for a truncated response.
Exit codes: 0 done, 2 bad arguments or weights.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from conf.formats import RunFileError
from conf.json_lines import HALF_SURROGATE, is_half_surrogate
from conf.strict_json import dumps
from trainer.corpus.rows import read_rows
from trainer.extension import add_modules
from trainer.policy.policy import Policy, Sampling, add_arguments, count, load_policy
from trainer.sampler import LogitsError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer.generate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--prompt", action="append", metavar="TEXT", help="a prompt; can be repeated")
    asked.add_argument("--prompts", type=Path, metavar="FILE", help="prompts, one JSON object per line")
    parser.add_argument(
        "--column", default="prompt", metavar="KEY", help="key of the prompt in --prompts (default: prompt)"
    )
    parser.add_argument("-n", "--samples", type=count, default=1, metavar="N", help="samples per prompt (default: 1)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write JSON lines to a file")
    parser.add_argument(
        "--raw", action="store_true", help="continue the prompts as they are, without the run's wording"
    )
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    options = parser.parse_args(arguments)
    add_modules()
    try:
        prompts = options.prompt or _read_prompts(options.prompts, options.column)
        policy, sampling = load_policy(options)
        if options.out is None:
            _write(policy, prompts, sampling, options, sys.stdout)
        else:
            partial = options.out.with_name(f".{options.out.name}.part")
            with partial.open("w") as file:
                _write(policy, prompts, sampling, options, file)
            partial.replace(options.out)
    except (RunFileError, LogitsError) as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _write(
    policy: Policy, prompts: Sequence[str], sampling: Sampling, options: argparse.Namespace, out: TextIO
) -> None:
    """Write all responses in the order of the prompts, each as soon as those before it have ended."""
    encode = policy.prompts.encode_text if options.raw else policy.prompts.encode_question
    waiting: dict[int, Any] = {}
    following = 0
    for row, response in policy.generate([encode(text) for text in prompts], options.samples, sampling):
        waiting[row] = response
        while following in waiting:
            text, finished = waiting.pop(following)
            asked, sample = divmod(following, options.samples)
            line = {"prompt": prompts[asked], "sample": sample, "text": text, "finished": finished}
            as_json = options.json or options.out is not None
            print(dumps(line, ensure_ascii=False) if as_json else text, file=out, flush=True)
            following += 1


def _read_prompts(file: Path, column: str) -> list[str]:
    """Return the prompts of a file. Raises RunFileError with the file and line of the first bad one."""
    found: list[str] = []
    for place, row, problem in read_rows(str(file), "--prompts"):
        if problem:
            raise RunFileError(f"--prompts: {place} {problem}")
        if not isinstance(row, dict) or not isinstance(row.get(column), str):
            keys = ", ".join(row) if isinstance(row, dict) else type(row).__name__
            raise RunFileError(f"--prompts: {place} has no text under the key {column!r}; it has {keys}; set --column")
        if is_half_surrogate(row[column]):
            raise RunFileError(f"--prompts: {place} {HALF_SURROGATE}, in column {column!r}")
        found.append(row[column])
    if not found:
        raise RunFileError(f"--prompts: {file} is empty")
    return found


if __name__ == "__main__":
    sys.exit(main())
