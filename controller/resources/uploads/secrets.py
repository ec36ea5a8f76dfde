"""The secrets of a run, found before a TPU is billed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Self

from controller.core.errors import ConfigError
from controller.reconcile.resource import Diff, ObservedResources, Resource, Scope, Unknown

if TYPE_CHECKING:
    from controller.context import Context
    from controller.inputs.secrets import Vault


@dataclass(frozen=True, kw_only=True)
class Secrets(Resource):
    """Every secret is where the config says. Nothing is created: what holds secrets is the user's."""

    kind: ClassVar[str] = "secrets"
    scope: ClassVar[Scope] = "run"
    vault: Vault = field(compare=False, repr=False)

    @property
    def title(self) -> str:
        return f"secrets {', '.join(self.vault.names)}"

    def observe(self, world: Context, have: ObservedResources) -> Unknown | Self:
        try:
            self.vault.open(world.google)
        except ConfigError as error:
            return Unknown(str(error))
        return self

    def apply(self, world: Context, have: ObservedResources, diff: Diff) -> None:
        """Nothing ever differs."""

    def destroy(self, world: Context) -> None:
        """They are the user's."""
