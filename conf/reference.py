"""How a config names a function or class of the user's own: `module:name`."""

import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, GetCoreSchemaHandler, GetJsonSchemaHandler, WithJsonSchema
from pydantic_core import CoreSchema, core_schema

PATTERN = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*"
"""A dotted module and a name in it."""
JSON_SCHEMA = {"type": "string", "pattern": rf"^(\?\?\?|{PATTERN})$"}
"""For editors; ??? stands for a value that a file leaves to its reader."""


def _is_reference(value: str) -> str:
    if not re.fullmatch(PATTERN, value):
        raise ValueError(f"must be module:name, such as {_meant(value) or 'my_module:my_function'}")
    return value


def _meant(value: str) -> str:
    """Return the reference that dashes, or a dot in place of the colon, stand for; empty if there is none."""
    plain = value.replace("-", "_")
    return next((word for word in (plain, ":".join(plain.rsplit(".", 1))) if re.fullmatch(PATTERN, word)), "")


Reference = Annotated[str, AfterValidator(_is_reference), WithJsonSchema(JSON_SCHEMA)]
"""`module:name`."""


@dataclass(frozen=True)
class OrReference:
    """Marks a text as one of Slipway's own choices, or `module:name`."""

    choices: tuple[str, ...]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._known, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        del schema, handler
        return {"anyOf": [{"type": "string", "enum": list(self.choices)}, JSON_SCHEMA]}

    def _known(self, value: str) -> str:
        if value not in self.choices and not re.fullmatch(PATTERN, value):
            example = f", such as {meant}" if (meant := _meant(value)) else ""
            raise ValueError(f"must be one of {', '.join(self.choices)}, or module:name{example}")
        return value
