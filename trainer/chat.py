"""Talk to a policy on this machine.

    python -m trainer.chat FOLDER

FOLDER is a checkpoint of a run, RUN/checkpoints/STEP, or a folder of exported weights. A policy that was trained with a
chat template remembers the conversation; another one answers each line by itself, worded as in its training, and a
model of plain text continues what you type. /reset forgets the conversation, /quit or Ctrl-D ends.
Exit codes: 0 done, 2 bad arguments or weights.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

from conf.chat_template import ChatMessage
from conf.formats import RunFileError
from trainer.extension import add_modules
from trainer.policy.policy import Policy, Sampling, add_arguments, load_policy
from trainer.sampler import LogitsError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer.chat", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    options = parser.parse_args(arguments)
    add_modules()
    try:
        policy, sampling = load_policy(options)
        print(f"{_manner(policy)}; /reset forgets, /quit ends", file=sys.stderr)
        _converse(policy, sampling)
    except (RunFileError, LogitsError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _manner(policy: Policy) -> str:
    if policy.prompts.chat is not None:
        return f"a conversation with the {'run' if policy.experiment else 'model'}'s chat template"
    if policy.prompts.has_wording:
        return "each line is a question of its own, worded as in the run's training"
    return "plain text: the model continues each line"


def _converse(policy: Policy, sampling: Sampling) -> None:
    """Answer each line of stdin until it ends."""
    prompts, turns = policy.prompts, list[ChatMessage]()
    number = 0
    while (line := _read_line()) is not None:
        if line in ("/quit", "/exit"):
            return
        if line == "/reset":
            turns.clear()
        if not line or line == "/reset":
            continue
        if prompts.chat is not None:
            turns.append(ChatMessage("user", line))
            tokens = prompts.encode_chat(turns)
        else:
            tokens = prompts.encode_question(line)
        written = _Written()
        try:
            drawn = policy.generate([tokens], 1, replace(sampling, seed=sampling.seed + number), stream=written.update)
            [(_, response)] = drawn
        except RunFileError as error:
            print(f"{error}; /reset forgets the conversation", file=sys.stderr)
            turns = turns[:-1]
            continue
        written.end(response.text)
        if not response.finished:
            print(f"(truncated after {sampling.max_new_tokens} tokens; see --max-new-tokens)", file=sys.stderr)
        turns.append(ChatMessage("assistant", response.text))
        number += 1


def _read_line() -> str | None:
    """Return the next line without surrounding white space; None at the end."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None


class _Written:
    """Prints a growing text: what is new of it each time, without characters that are not complete yet."""

    def __init__(self) -> None:
        self._shown = ""

    def update(self, text: str) -> None:
        complete = text.rstrip("\N{REPLACEMENT CHARACTER}")
        if complete.startswith(self._shown):
            print(complete[len(self._shown) :], end="", flush=True)
            self._shown = complete

    def end(self, text: str) -> None:
        print(text[len(self._shown) :] if text.startswith(self._shown) else f"\n{text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
