"""A taskset as a user of the `verifiers` package writes it: arithmetic over a catalogue of stars, with two tools."""

import verifiers.v1 as vf

STARS = {"vega": 25, "altair": 17, "deneb": 1500}


class CatalogueTools(vf.Toolset):
    """Tools over the catalogue."""

    TOOL_PREFIX = None

    @vf.tool
    def distance(self, star: str) -> int:
        """Light years to a star."""
        return STARS[star]

    @vf.tool(name="add")
    async def add_up(self, first: int, second: int = 0) -> dict[str, int]:
        """Add two numbers."""
        return {"sum": first + second}

    @vf.tool
    def outage(self) -> str:
        """A tool whose server is away."""
        raise ConnectionError("away")


class SumData(vf.TaskData):
    """One sum."""

    answer: str


class SumTask(vf.Task[SumData]):
    """Right if the last reply is the sum; a little for having looked it up."""

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def looked_up(self, task: SumData, trace: vf.Trace) -> float:
        return float(any(message.name == "distance" for message in trace.tool_messages) and task.answer != "")

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        if "explode" in trace.last_reply:
            raise ValueError("no number in it")
        return trace.num_turns


class SumConfig(vf.TasksetConfig):
    """How many sums."""

    count: int = 3


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    """Distances of pairs of stars."""

    def load(self):
        names = sorted(STARS)
        for number in range(self.config.count):
            first, second = names[number % 3], names[(number + 1) % 3]
            data = SumData(
                prompt=f"How far are {first} and {second} together?", system_prompt="Be exact.", answer=str(STARS[first] + STARS[second])
            )
            yield SumTask(data, self.config.task)

    @classmethod
    def toolsets(cls, config):
        return [CatalogueTools(vf.ToolsetConfig())]


__all__ = ["SumTaskset"]
