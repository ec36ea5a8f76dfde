"""Pack the worker agent's package into one zip file that Python runs."""

import hashlib
import io
import zipfile
from dataclasses import dataclass
from pathlib import Path

import controller.agent


@dataclass(frozen=True)
class AgentBundle:
    """Zip file of the agent. `name` is its file name on a worker and contains the hash of `content`."""

    name: str
    content: bytes

    def shell(self, command: str) -> str:
        """Return the shell command that runs a command of the agent; exit code 2 means that the agent is missing.

        Python starts faster from what the zip file has unpacked. `sh`, because the user's shell is unknown.
        """
        folder = f"~/.slipway/{self.name.removesuffix('.pyz')}"
        unpacked = f'test -e "$a/__main__.py" && exec python3 "$a/__main__.py" {command}'
        return f"sh -c 'a={folder}; {unpacked}; exec python3 \"$a.pyz\" {command}'"

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()


def build_bundle() -> AgentBundle:
    """Pack the agent of this installation. The same files give the same bytes on every host."""
    package = Path(controller.agent.__file__).parent
    files = {f"slipway_agent/{p.relative_to(package).as_posix()}": p.read_bytes() for p in package.rglob("*.py")}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in sorted({**files, "__main__.py": files["slipway_agent/__main__.py"]}.items()):
            archive.writestr(zipfile.ZipInfo(name), content)
    content = buffer.getvalue()
    return AgentBundle(f"agent-{hashlib.sha256(content).hexdigest()[:12]}.pyz", content)
