"""Checks of a config and its plan, one file per topic; each check's docstring gives its reason.

What one section alone can tell is in `conf/schema/`, what Google says when a resource is made in
`controller/resources/`. Imports the plan, the inputs and Google's client, never a run.
"""
