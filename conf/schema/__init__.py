"""The config's schema: what each section may say, and one line for each mistake in it.

The values are in the YAML of `conf/`, and checks that need Google, files or another section's meaning are in
`controller/checks/`. Imports pydantic and the rest of `conf`.
"""
