"""The bastion of `recovery.driver=bastion`: a small VM beside the pod, on which this controller drives a run."""
