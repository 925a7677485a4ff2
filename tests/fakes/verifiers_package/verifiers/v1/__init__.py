"""Stands for the public classes of verifiers.v1 (0.4.0) that our adapter uses, where the package is not installed.

It has their names, fields and call forms and none of their servers; the tests of the adapter run against either.
"""

import importlib
import inspect
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

DataT = TypeVar("DataT")
TaskT = TypeVar("TaskT")
ConfigT = TypeVar("ConfigT")


class TaskError(Exception): ...


class State(BaseModel): ...


class _Message(BaseModel):
    content: Any = None


class SystemMessage(_Message):
    role: str = "system"


class UserMessage(_Message):
    role: str = "user"


class ToolCall(BaseModel):
    id: str
    name: str
    arguments: str


class AssistantMessage(_Message):
    role: str = "assistant"
    tool_calls: list[ToolCall] | None = None


class ToolMessage(_Message):
    role: str = "tool"
    tool_call_id: str
    name: str | None = None


class MessageNode(BaseModel):
    parent: int | None = None
    message: Any
    sampled: bool = False


class AgentConfig(BaseModel): ...


class AgentInfo(BaseModel):
    config: AgentConfig


class TraceTask(BaseModel):
    type: str
    data: Any


class Trace(BaseModel):
    task: TraceTask
    agent: AgentInfo
    nodes: list[MessageNode] = []
    rewards: dict[str, Any] = {}
    metrics: dict[str, Any] = {}

    @property
    def reward(self) -> float:
        return sum(one.score * one.weight for one in self.rewards.values())

    @property
    def num_turns(self) -> int:
        return sum(node.sampled for node in self.nodes)

    @property
    def tool_messages(self) -> list[ToolMessage]:
        return [node.message for node in self.nodes if isinstance(node.message, ToolMessage)]

    @property
    def last_reply(self) -> str:
        said = [node.message for node in self.nodes if node.sampled]
        return (said[-1].content or "").strip() if said else ""


class TaskConfig(BaseModel):
    judges: list[Any] = []


class TasksetConfig(BaseModel):
    id: str = ""
    task: TaskConfig = TaskConfig()


class TaskData(BaseModel):
    prompt: Any = None
    system_prompt: str | None = None

    @property
    def prompt_text(self) -> str:
        return self.prompt if isinstance(self.prompt, str) else "\n\n".join(message.content for message in self.prompt)


def _mark(**fields: Any) -> Any:
    def decorate(function: Any) -> Any:
        for key, value in fields.items():
            setattr(function, key, value)
        return function

    return decorate


def tool(function: Any = None, name: str | None = None) -> Any:
    mark = _mark(tool=True, tool_name=name)
    return mark if function is None else mark(function)


def reward(function: Any = None, weight: float = 1.0) -> Any:
    mark = _mark(reward=True, weight=weight)
    return mark if function is None else mark(function)


def metric(function: Any) -> Any:
    return _mark(metric=True)(function)


def stop(function: Any) -> Any:
    return _mark(stop=True)(function)


class Task(Generic[DataT]):
    NEEDS_CONTAINER = False

    def __init__(self, data: DataT, config: TaskConfig | None = None) -> None:
        self.data, self.config = data, config or TaskConfig()

    async def setup(self, trace: Any, runtime: Any) -> None: ...

    async def finalize(self, trace: Any, runtime: Any) -> None: ...

    @classmethod
    def toolsets(cls, config: Any) -> list[Any]:
        return []

    def hooks(self, kind: str) -> list[Any]:
        return [getattr(self, one) for one in sorted(dir(type(self))) if getattr(getattr(type(self), one), kind, False)]

    async def score(self, trace: Trace) -> None:
        available = {"task": self.data, "trace": trace}
        try:
            for kind, kept in (("metric", trace.metrics), ("reward", trace.rewards)):
                for hook in self.hooks(kind):
                    asked = {name: available[name] for name in inspect.signature(hook).parameters}
                    found = await hook(**asked)
                    kept[hook.__name__] = found if kind == "metric" else SimpleNamespace(score=float(found), weight=hook.weight)
        except Exception as error:
            raise TaskError(str(error)) from error


class ToolsetConfig(BaseModel):
    url: str | None = None


class Toolset:
    TOOL_PREFIX: str | None = ""

    def __init__(self, config: ToolsetConfig) -> None:
        self.config, self.state = config, State()

    @property
    def server_name(self) -> str:
        if self.TOOL_PREFIX is None:
            return ""
        return self.TOOL_PREFIX or "".join(("_" + c.lower() if c.isupper() else c) for c in type(self).__name__).lstrip("_")

    async def setup(self) -> None: ...

    async def setup_task(self, task: Any) -> None: ...


class Taskset(Generic[TaskT, ConfigT]):
    INFINITE = False
    most: int | None = None

    def __init__(self, config: Any) -> None:
        self.config = config

    def __iter__(self) -> Any:
        for number, task in enumerate(self.load()):  # pyright: ignore
            if number == self.most:
                return
            yield task

    @property
    def bounded(self) -> bool:
        return not self.INFINITE or self.most is not None

    def take(self, count: int) -> Any:
        self.most = count
        return self

    @classmethod
    def toolsets(cls, config: Any) -> list[Any]:
        return []


def _class(taskset_id: str) -> Any:
    module = importlib.import_module(taskset_id.replace("-", "_"))
    return getattr(module, module.__all__[0])


def taskset_config_type(taskset_id: str) -> Any:
    return _class(taskset_id).__orig_bases__[0].__args__[1]


def load_taskset(config: Any) -> Any:
    return _class(config.id)(config)
