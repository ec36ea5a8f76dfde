"""What a run keeps beside its checkpoints, so that its weights can be used without its pod and its data.

RUN/run.yaml says of what model they are and how prompts are written; RUN/tokenizer/ has the tokenizer.
"""

import yaml
from etils import epath

from conf.schema.training.run_yaml import RunFile, RunFileError
from trainer.policy.tokenizer_files import TOKENIZER_FILE, TOKENIZER_FOLDER, tokenizer_files
from trainer.pretrained.run_weights import RUN_FILE


def run_yaml(experiment: RunFile) -> str:
    return yaml.safe_dump(experiment.model_dump(mode="json"), sort_keys=False)


def write_run_files(experiment: RunFile) -> None:
    """Write what is missing of a run's files; call it on process 0 only."""
    run = epath.Path(experiment.dir)
    if not (run / RUN_FILE).exists():  # the controller writes it before the launch
        run.mkdir(parents=True, exist_ok=True)
        (run / RUN_FILE).write_text(run_yaml(experiment))
    folder = run / TOKENIZER_FOLDER
    if (folder / TOKENIZER_FILE).exists():
        return
    try:
        files = dict(tokenizer_files(experiment.data))
    except RunFileError:
        return  # the loop reads the same text on all processes, and reports this
    for name in sorted(files, key=lambda name: name == TOKENIZER_FILE):  # last, since it marks that all are there
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(files[name])
