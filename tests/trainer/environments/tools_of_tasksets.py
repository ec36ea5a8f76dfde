"""A server of tools for games_of_tasksets, a program of its own as in the library."""

import verifiers.v1 as vf


class SumTools(vf.Toolset[vf.ToolsetConfig, vf.State]):
    TOOL_PREFIX = None

    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)


if __name__ == "__main__":
    SumTools.run()
