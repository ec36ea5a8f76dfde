"""What every section of the config is: frozen, closed, documented; some keys are volatile."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, StringConstraints


class Strict(BaseModel):
    """A section: immutable, and an unknown key is an error (Hydra would merge a typo without a word)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)


class Volatile:
    """Marks a key that says where or how patiently a run is executed, never what it computes.

    Such keys stay out of a run's identity: the same experiment in another zone is the same experiment.
    """


VOLATILE = Volatile()

Name = Annotated[str, StringConstraints(pattern=r"^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$")]
"""A name as Google's resources take it (RFC 1035 label)."""
Zone = Annotated[str, StringConstraints(pattern=r"^[a-z]+-[a-z]+\d+-[a-z0-9]+$")]


def without_volatile(section: BaseModel) -> dict[str, Any]:
    """The section as plain JSON data, without its volatile keys, at any depth."""
    plain = section.model_dump(mode="json")
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if any(isinstance(mark, Volatile) for mark in field.metadata):
            del plain[name]
        elif isinstance(value, BaseModel):
            plain[name] = without_volatile(value)
        elif isinstance(value, dict):
            plain[name] = {
                k: without_volatile(v) if isinstance(v, BaseModel) else plain[name][k] for k, v in value.items()
            }
    return plain
