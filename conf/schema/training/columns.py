"""The columns that a template of words names: `{question}`."""

from string import Formatter


def template_columns(template: str) -> list[str]:
    """The columns that a template names, in its order. Raises ValueError for what `{name}` cannot hold."""
    names: list[str] = []
    for _, name, form, conversion in Formatter().parse(template):
        if name is None:
            continue
        if not name or form or conversion or set(name) & set(".[]"):
            raise ValueError("{…} must hold the name of a column and nothing else; write {{ for a brace")
        names.append(name)
    return names
