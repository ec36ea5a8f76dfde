"""Weights in and out.

    python -m trainer.convert import FROM TO [--model model.yaml]   # FROM: Hugging Face folder, or DeepMind's Gemma
    python -m trainer.convert export FROM TO                        # TO: a folder that transformers reads

Folders are local or gs://. What `import` writes is what `model.weights` of an experiment names: an Orbax checkpoint
of the weights in the types they came in, and model.yaml, which says what model they are of.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import jax
import yaml
from etils import epath
from pydantic import ValidationError

from conf.schema.training.model import Model
from trainer.pretrained import gemma_orbax, hf_families, hf_files, store
from trainer.pretrained.hf_files import CheckpointError


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 2 it cannot be done (one line on stderr says why)."""
    parser = argparse.ArgumentParser(prog="python -m trainer.convert", description=__doc__)
    parser.add_argument("action", choices=["import", "export"])
    parser.add_argument("source", type=epath.Path)
    parser.add_argument("target", type=epath.Path)
    parser.add_argument("--model", type=epath.Path, help="the model section, as YAML, where FROM does not tell it")
    options = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")  # a TPU that is here is left to who trains on it
    try:
        if (options.target / store.DESCRIPTION).exists() or (options.target / "config.json").exists():
            raise CheckpointError(f"{options.target}: holds a model already; give another folder")
        if options.action == "import":
            cfg, params = _import(options.source, options.model)
            store.write(options.target, params, cfg)
        else:
            cfg = store.describe(options.source)
            config = hf_families.config_for(cfg)
            hf_files.write(options.target, store.read(options.source, cfg), cfg, config)
    except (CheckpointError, hf_families.UnknownArchitectureError, store.StoreError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _import(source: epath.Path, described: epath.Path | None) -> tuple[Model, hf_files.Params]:
    if not source.exists():
        raise CheckpointError(f"{source}: there is no such folder")
    if (source / "config.json").exists():
        cfg = hf_families.model_from(hf_files.read_config(source))
        return cfg, hf_files.read(source, cfg)
    if not gemma_orbax.is_checkpoint(source):
        raise CheckpointError(f"{source}: is neither a Hugging Face model (config.json) nor an Orbax checkpoint")
    if described is None:
        raise CheckpointError(f"{source}: does not say what model it is; give --model with its section as YAML")
    try:
        cfg = Model.model_validate(yaml.safe_load(described.read_text()))
    except (OSError, ValidationError, yaml.YAMLError) as error:
        raise CheckpointError(f"{described}: is no description of a model: {error}") from None
    return cfg, gemma_orbax.read(source, cfg)


if __name__ == "__main__":
    sys.exit(main())
