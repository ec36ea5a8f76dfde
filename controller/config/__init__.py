"""From words and YAML to one validated config, with Hydra; and why that fails, with file and line.

What a config means for Google or the workers is in `controller/checks/` and `controller/plan/`. Imports `conf`, Hydra
and `controller/core/`.
"""
