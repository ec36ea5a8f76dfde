"""Weights in and out.

    python -m trainer.convert import FROM TO   # FROM: a Hugging Face folder
    python -m trainer.convert export FROM TO   # TO: a folder that transformers reads

FROM and TO are local or gs://. What `import` writes is what `model.weights` of an experiment names: an Orbax checkpoint
of the weights in the types they came in, and model.yaml, which says what model they are of. `export` takes that, or a
checkpoint of a run, RUN/checkpoints/STEP, with its tokenizer and chat template; `--format slipway` writes what `import`
does.
"""

import argparse
import sys
from collections.abc import Sequence

import jax
from etils import epath

from conf.schema.training.run_yaml import RunFileError
from trainer.policy.export import FORMATS, export_weights
from trainer.pretrained import hf_families, hf_files, store
from trainer.pretrained.hf_files import PretrainedError


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 2 it cannot be done (one line on stderr says why)."""
    parser = argparse.ArgumentParser(prog="python -m trainer.convert", description=__doc__)
    parser.add_argument("action", choices=["import", "export"])
    parser.add_argument("source", type=epath.Path)
    parser.add_argument("target", type=epath.Path)
    parser.add_argument("--format", choices=FORMATS, default="hf", help="of an export (hf)")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="of an export (that of the weights)"
    )
    parser.add_argument("--tokenizer", help="tokenizer.json of an export, if the source has none")
    options = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")  # a TPU that is here is left to who trains on it
    try:
        if (options.target / store.DESCRIPTION_FILE).exists() or (options.target / "config.json").exists():
            raise PretrainedError(f"{options.target}: already contains a model; choose another folder")
        if options.action == "import":
            if not (options.source / "config.json").exists():
                raise PretrainedError(f"{options.source}: is not a Hugging Face model: it has no config.json")
            cfg = hf_families.model_from_config(hf_files.read_config(options.source))
            store.write_params(options.target, hf_files.read_params(options.source, cfg), cfg)
        else:
            where = (options.source, options.target, options.format, options.dtype, options.tokenizer)
            for note in export_weights(*where):
                print(f"note: {note}", file=sys.stderr)
    except (PretrainedError, hf_families.UnknownArchitectureError, RunFileError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
