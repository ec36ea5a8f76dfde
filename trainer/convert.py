"""Convert weights between Hugging Face's format and Slipway's.

    python -m trainer.convert import FROM TO   # FROM: a Hugging Face folder
    python -m trainer.convert export FROM TO   # TO: a folder that transformers reads

`import` writes a folder for `model.weights`: an Orbax checkpoint of the weights, with their dtypes unchanged, and
model.yaml, which describes the model. `export` reads such a folder or a checkpoint of a run, RUN/checkpoints/STEP, with
its tokenizer and chat template; with `--format slipway` it writes what `import` writes.
Exit codes: 0 done, 2 bad arguments or weights.
"""

import argparse
import sys
from collections.abc import Sequence

import jax
from etils import epath

from conf.formats import RunFileError
from trainer.corpus import files
from trainer.policy.export import FORMATS, export_weights
from trainer.pretrained import hf_families, hf_files, store
from trainer.pretrained.hf_files import PretrainedError


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 2 it cannot be done (one line on stderr says why)."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer.convert", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["import", "export"], help="into Slipway's format, or out of it")
    parser.add_argument("source", type=epath.Path, metavar="FROM", help="folder to read, local or gs://…")
    parser.add_argument("target", type=epath.Path, metavar="TO", help="folder to write, local or gs://…")
    parser.add_argument("--format", choices=FORMATS, default="hf", help="format of an export (default: hf)")
    dtypes = ["float32", "bfloat16", "float16"]
    parser.add_argument("--dtype", choices=dtypes, help="dtype of an export (default: that of the weights)")
    parser.add_argument("--tokenizer", metavar="FILE", help="tokenizer.json of an export, if the source has none")
    options = parser.parse_args(arguments)
    files.use_buckets()
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
            notes = export_weights(options.source, options.target, options.format, options.dtype, options.tokenizer)
            for note in notes:
                print(f"note: {note}", file=sys.stderr)
    except (RunFileError, hf_families.UnknownArchitectureError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
