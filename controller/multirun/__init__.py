"""Jobs of other people's Hydra apps, for the launcher in `installed/hydra_plugins`: each is a run on a pool of pods."""
