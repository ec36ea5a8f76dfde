"""Check that the secrets of a run exist before a TPU is billed."""

from dataclasses import dataclass, field
from typing import ClassVar, Self

from controller.context import Context
from controller.core.errors import ConfigError
from controller.inputs.secrets import Vault
from controller.reconcile.resource import Diff, ObservedResources, Resource, Scope, Unknown


@dataclass(frozen=True, kw_only=True)
class Secrets(Resource):
    """All secrets of the run, in the places that the config names. Nothing is created: the stores are the user's."""

    kind: ClassVar[str] = "secrets"
    scope: ClassVar[Scope] = "run"
    vault: Vault = field(compare=False, repr=False)

    @property
    def title(self) -> str:
        return f"secrets {', '.join(self.vault.names)}"

    def observe(self, context: Context, observed: ObservedResources) -> Unknown | Self:
        try:
            self.vault.load(context.google)
        except ConfigError as error:
            return Unknown(str(error))
        return self

    def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None:
        """Do nothing: secrets never differ."""
