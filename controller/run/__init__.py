"""One run, from `up` to its result: the pod, attempts, launch, following, cancelling, the end.

Why an attempt failed is judged in `controller/recovery/`, several runs are driven by `controller/sweep/`. Imports plan,
records and recovery.
"""
