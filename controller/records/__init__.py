"""Records of runs: inputs and results, kept so that every number can be traced back to its config and code."""
