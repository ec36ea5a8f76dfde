"""Which variables of this machine `${oc.env:NAME}` may put into a config, which is shown and recorded."""

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from controller.core.errors import ConfigError

SECRET_NAME = re.compile(
    r"TOKEN|SECRET|CREDENTIAL|PASSW|PASSPHRASE|PRIVATE|COOKIE|(^|_)(PASS|PAT|PWD|AUTH|DSN)(_|$)|API_?KEY|_KEY(_|$)",
    re.I,
)
"""Names of variables that hold a secret, or may."""
SECRET_VALUE = re.compile(r"://[^/\s:@]*:[^/\s@]+@|-----BEGIN [A-Z ]*PRIVATE KEY-----")
"""An address with a password, or a private key."""
NOT_SECRET = frozenset({"PWD", "OLDPWD"})
"""Folders."""


HYDRA_LOCK = threading.Lock()
"""Held while a config is composed: Hydra and OmegaConf keep globals, and threads compose configs of records."""


@contextmanager
def guarded_variables() -> Iterator[None]:
    """Refuse `${oc.env:NAME}` of a secret inside the block: its value would be in the plan and in the record.

    One thread at a time may be inside.
    The resolver of OmegaConf is put back afterwards: a notebook, or a Hydra program, may have configs of its own.
    """
    from omegaconf import OmegaConf
    from omegaconf.resolvers import oc

    def lookup(name: str, *default: Any) -> str | None:
        is_secret = SECRET_NAME.search(name) and name not in NOT_SECRET
        if is_secret or SECRET_VALUE.search(os.environ.get(name, "")):
            raise ConfigError(
                f"${{oc.env:{name}}} would put a secret into the plan and the record; use "
                f"env.secrets.{name}=env, which passes the variable on to the program"
            )
        return oc.env(name, *default)

    with HYDRA_LOCK:
        OmegaConf.register_new_resolver("oc.env", lookup, replace=True)
        try:
            yield
        finally:
            OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)
