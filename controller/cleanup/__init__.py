"""What `down` and `orphans` delete, and what keeps them from it.

How one resource is deleted is in `controller/resources/`, the questions to the user in `controller/cli/`. Imports runs,
records and resources.
"""
