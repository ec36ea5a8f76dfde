"""One module per kind of resource: how to observe, create and delete it.

In which order is up to `controller/plan/`. Imports Google's client, SSH and the reconciler's interface.
"""
