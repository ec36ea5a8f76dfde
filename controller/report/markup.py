"""HTML as a tree: xml.etree escapes text, so it cannot become markup; unprintable characters are written out."""

from typing import Any
from xml.etree.ElementTree import Element, SubElement, tostring

from controller.core.printable import printable


def add_child(parent: Element, tag: str, text: object = "", **attributes: object) -> Element:
    """Add a last child. `class_` sets the attribute class, `aria_label` aria-label; None and False omit one."""
    given = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()}
    child = SubElement(
        parent, tag, {k: _attribute_value(v) for k, v in given.items() if v is not None and v is not False}
    )
    if text != "":
        child.text = str(text) if tag == "style" else printable_text(text)
    return child


def printable_text(text: object) -> str:
    """Return text that is valid on a page, with control characters and lone surrogates written out."""
    return printable(str(text)).encode("utf-8", "backslashreplace").decode()


def serialize_page(root: Element) -> str:
    return "<!DOCTYPE html>\n" + tostring(root, encoding="unicode", method="html") + "\n"


def _attribute_value(value: Any) -> str:
    return (
        ""
        if value is True
        else f"{value:.2f}".rstrip("0").rstrip(".")
        if isinstance(value, float)
        else printable_text(value)
    )
