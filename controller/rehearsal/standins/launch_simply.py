"""Stands in for Simply (https://github.com/google-deepmind/simply, simply/main.py)."""

import argparse

import standin

CONFIGS = ("gemma2_2b_gsm8k_2k_rl_16", "lm_test")

parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--experiment_config", required=True, choices=CONFIGS)
parser.add_argument("--experiment_dir", required=True)
parser.add_argument("--alsologtostderr", action="store_true")
for flag in ("sharding_config", "mesh_shape", "dcn_mesh_shape", "decoding_mesh_shape"):
    parser.add_argument(f"--{flag}")
flags = parser.parse_args()
models, datasets, vocabs = standin.variables("SIMPLY_MODELS", "SIMPLY_DATASETS", "SIMPLY_VOCABS")
standin.expect(models, "GEMMA-2.0-2B-PT-ORBAX/0/_METADATA")
standin.expect(datasets, "gsm8k/gsm8k.json")
standin.expect(vocabs, "spm-256000-gemma2-2gram.model")
standin.train(f"{flags.experiment_dir}/checkpoints", vars(flags))
