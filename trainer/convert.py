"""Weights in and out.

    python -m trainer.convert import FROM TO [--model model.yaml]   # FROM: Hugging Face folder, or DeepMind's Gemma
    python -m trainer.convert export FROM TO                        # TO: a folder that transformers reads

Folders are local or gs://. What `import` writes is what `model.weights` of an experiment names: an Orbax checkpoint
of the weights in the types they came in, and model.yaml, which says what model they are of.
"""

import argparse
import sys
from collections.abc import Sequence

import jax
import yaml
from etils import epath
from pydantic import ValidationError

from conf.schema.training.model import Model
from trainer.pretrained import gemma_orbax, hf_families, hf_files, store
from trainer.pretrained.hf_files import PretrainedError


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 2 it cannot be done (one line on stderr says why)."""
    parser = argparse.ArgumentParser(prog="python -m trainer.convert", description=__doc__)
    parser.add_argument("action", choices=["import", "export"])
    parser.add_argument("source", type=epath.Path)
    parser.add_argument("target", type=epath.Path)
    parser.add_argument("--model", type=epath.Path, help="model section as YAML, if FROM does not describe its model")
    options = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")  # a TPU that is here is left to who trains on it
    try:
        if (options.target / store.DESCRIPTION_FILE).exists() or (options.target / "config.json").exists():
            raise PretrainedError(f"{options.target}: already contains a model; choose another folder")
        if options.action == "import":
            cfg, params = _load_source(options.source, options.model)
            store.write_params(options.target, params, cfg)
        else:
            cfg = store.read_model(options.source)
            config = hf_families.hf_config(cfg)
            hf_files.write_params(options.target, store.read_params(options.source, cfg), cfg, config)
    except (PretrainedError, hf_families.UnknownArchitectureError, store.StoreError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _load_source(source: epath.Path, described: epath.Path | None) -> tuple[Model, hf_files.Params]:
    if not source.exists():
        raise PretrainedError(f"{source}: no such folder")
    if (source / "config.json").exists():
        cfg = hf_families.model_from_config(hf_files.read_config(source))
        return cfg, hf_files.read_params(source, cfg)
    if not gemma_orbax.is_checkpoint(source):
        raise PretrainedError(f"{source}: is neither a Hugging Face model (config.json) nor an Orbax checkpoint")
    if described is None:
        raise PretrainedError(f"{source}: does not describe its model; pass --model with the model section as YAML")
    try:
        cfg = Model.model_validate(yaml.safe_load(described.read_text()))
    except (OSError, ValidationError, yaml.YAMLError) as error:
        raise PretrainedError(f"{described}: not a valid model section: {error}") from None
    return cfg, gemma_orbax.read_params(source, cfg)


if __name__ == "__main__":
    sys.exit(main())
