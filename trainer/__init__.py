"""Pod side: `python -m trainer run.yaml`. Knows JAX, knows no cloud."""
