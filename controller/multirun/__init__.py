"""Jobs of other people's Hydra apps, for the launcher in `controller/installed`: each is a run on a pool of pods."""
