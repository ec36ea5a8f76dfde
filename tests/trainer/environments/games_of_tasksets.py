"""A taskset written with the classes of verifiers 0.4 alone, as their users write them."""

from collections.abc import Iterator

import verifiers.v1 as vf
from tools_of_tasksets import SumTools

__all__ = ["SumTaskset"]


CALL = '<tool_call>{{"name": "bash", "arguments": {{"command": "expr {} + {} | tee sum.txt"}}}}</tool_call>'


class SumData(vf.TaskData):
    answer: str
    solution: str


class SumTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig | None = None


class SumTask(vf.Task[SumData, vf.State, SumTaskConfig]):
    @classmethod
    def toolsets(cls, config: SumTaskConfig) -> list[vf.Toolset]:
        return [] if config.tools is None else [SumTools(config.tools)]

    @vf.reward
    async def right(self, task: SumData, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == task.answer)

    @vf.reward(weight=0.25)
    async def brevity(self, trace: vf.Trace) -> float:
        return 1 / trace.num_turns

    @vf.metric
    async def file_is_there(self, runtime: vf.Runtime) -> float:
        return float((await runtime.run(["test", "-e", "sum.txt"], {})).exit_code == 0)


class SumConfig(vf.TasksetConfig):
    task: SumTaskConfig = SumTaskConfig()
    first: int = 6
    forever: bool = False


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    @property
    def INFINITE(self) -> bool:  # noqa: N802 - the library's name
        return self.config.forever

    def load(self) -> Iterator[SumTask]:
        number = self.config.first
        while self.config.forever or number < self.config.first + 4:
            answer, worked = str(2 * number + 1), CALL.format(number, number + 1)
            data = SumData(prompt=f"What is {number}+{number + 1}?", answer=answer, solution=worked + answer)
            yield SumTask(data, self.config.task)
            number += 1
