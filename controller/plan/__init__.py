"""The plan: which resources a config needs, in which order, and the permissions that they use.

How one is observed and applied is in `controller/resources/`, who walks the plan in `controller/reconcile.py`. Imports
resources, and makes no request.
"""
