"""Runs a taskset written for the `verifiers` package (its v1 classes) unchanged, where its tools are plain Python.

`verifiers` itself is installed by who brings such a taskset: `pip install verifiers==0.4.0`; nothing here loads it before a
run asks for this environment. A taskset may have tools of its own or of each task, rewards and metrics over the trace. What
needs a container, a judge, a user to talk to, state that lives on a server, or a stop condition is refused by name.
"""

import asyncio
import importlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, cast

from environments.base import Limits, Outcome, Question, Reply, Setting, Split, in_range, read_settings, unknown_name
from environments.dialogue import Progress, ToolDialogue
from stoa.chat.render import ChatRenderer, Message, Role, system_message
from stoa.chat.tools import ToolCall, Value
from stoa.chat.turns import read_turn
from stoa.contracts.errors import ConfigError, InfrastructureFaultError, MissingExtraError

NAME = "verifiers"
CORRECTION = Message("tool", "That was neither a call of a tool nor an answer. Call a tool, or end with your answer.")
# What a tool raises over what it was given is said to the policy; the rest of OSError is not the policy's doing.
_TOOL_FAULTS: Final = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError, AssertionError, OSError)
_MOST_FAULT_CHARS: Final = 300
_OUTAGES: Final = (ConnectionError, TimeoutError)


@dataclass(frozen=True, slots=True)
class VerifiersSettings:
    """Settings of a run's `environment` table.

    `taskset` is the module or package that exports the Taskset; `config` the JSON of its own config; `num_tasks` how many
    tasks to take, 0 for all of a finite taskset; the last `num_held_out` of them are held out. An episode counts as solved,
    in exact_match, cover and strict_cover alike, from a reward of `solved_at` on. `reply_seconds`: longest that the tools and
    rewards of a turn may take, if they wait for something and may be called from several threads; 0 calls them one at a
    time, and decoding waits.
    """

    taskset: str = ""
    config: str = "{}"
    num_tasks: int = 0
    num_held_out: int = 0
    solved_at: float = 1.0
    max_calls: int = 8
    max_corrections: int = 1
    max_turn_tokens: int = 1024
    max_episode_tokens: int = 8192
    reply_seconds: float = 0.0

    def check(self) -> None:
        """Raise ConfigError for a value out of range."""
        in_range(NAME, "num_tasks", self.num_tasks, 0, 10_000_000)
        in_range(NAME, "num_held_out", self.num_held_out, 0, 10_000_000)
        in_range(NAME, "max_calls", self.max_calls, 0, 64)
        in_range(NAME, "max_corrections", self.max_corrections, 0, 16)
        in_range(NAME, "max_turn_tokens", self.max_turn_tokens, 4, 65536)
        in_range(NAME, "max_episode_tokens", self.max_episode_tokens, 64, 1 << 20)
        in_range(NAME, "reply_seconds", self.reply_seconds, 0.0, 3600.0)


@dataclass(frozen=True, slots=True)
class _Stage:
    """One task with the turn loop over its tools."""

    task: Any
    prompt: tuple[int, ...]
    messages: list[Message]
    dialogue: ToolDialogue
    run_tool: Callable[[ToolCall], Message | None]


class VerifiersEnvironment:
    """See `environments.base.Environment`. The id of a question is the position of its task."""

    name = NAME

    def __init__(self, settings: VerifiersSettings, tokenizer_json: bytes) -> None:
        settings.check()
        self._settings = settings
        self._vf, taskset = _load(settings)
        self._tasks: dict[str, Any] = {f"t{number:06d}": task for number, task in enumerate(taskset)}
        _refuse_unfit(self._vf, settings.taskset, taskset, next(iter(self._tasks.values()), None))
        if not 0 <= settings.num_held_out < len(self._tasks):
            raise ConfigError(
                f"environment {NAME}: {len(self._tasks)} tasks, of which {settings.num_held_out} are held out", hint="hold out fewer"
            )
        self._shared_tools = _tools_of(self._vf, type(taskset).toolsets(taskset.config), None)
        self._renderer = ChatRenderer(tokenizer_json)
        num_turns = settings.max_calls + settings.max_corrections + 1
        self.limits = Limits(num_turns, settings.max_turn_tokens, settings.max_episode_tokens, settings.reply_seconds)
        self.stop_ids = frozenset({self._renderer.special.im_end})
        self._stage = lru_cache(maxsize=4096)(self._build_stage)

    def question_ids(self, split: Split) -> list[str]:
        """In the order of the taskset; the last ones are held out."""
        ids, border = list(self._tasks), len(self._tasks) - self._settings.num_held_out
        return {"train": ids[:border], "held_out": ids[border:], "transfer": []}[split]

    def question(self, question_id: str) -> Question:
        """The prompt's text; a task of this kind lists no answers. UnknownNameError if there is no such task."""
        split: Split = "held_out" if question_id in self.question_ids("held_out") else "train"
        return Question(question_id, str(self._task(question_id).data.prompt_text), (), split, question_id)

    def prompt_ids(self, question_id: str) -> tuple[int, ...]:
        """The task's system prompt with its tools, and its messages."""
        self._task(question_id)
        return self._stage(question_id).prompt

    def reply(self, question_id: str, turns: Sequence[Sequence[int]]) -> Reply:
        """The results of the tools, a correction, or the end. A turn without calls is the answer."""
        return self._last(question_id, turns).reply

    def score(self, question_id: str, turns: Sequence[Sequence[int]]) -> Outcome:
        """The taskset's own weighted reward of an episode that ended with an answer, with its rewards and metrics as parts."""
        last = self._last(question_id, turns)
        rewards: dict[str, float] = {}
        total, failed = 0.0, False
        if last.answered:
            trace = self._trace(self._stage(question_id), turns)
            try:
                asyncio.run(self._task(question_id).score(trace))
                total = float(trace.reward)
                rewards = {name: one.score for name, one in trace.rewards.items() if one is not None}
                rewards |= {name: value for name, value in trace.metrics.items() if value is not None}
            except self._vf.TaskError:
                # A reward that cannot be worked out for what the policy wrote must not be a way out of being scored.
                failed = True
        solved = float(total >= self._settings.solved_at)
        return Outcome(
            total,
            {f"vf_{name}": float(value) for name, value in rewards.items()}
            | dict.fromkeys(("exact_match", "cover", "strict_cover"), solved)
            | {
                "searched": float(last.num_calls > 0),
                "num_calls": float(last.num_calls),
                "malformed": float(last.reply.stop_reason == "malformed"),
                "num_malformed": float(last.num_malformed),
                "score_failed": float(failed),
            },
        )

    def _task(self, question_id: str) -> Any:
        if question_id not in self._tasks:
            raise unknown_name(f"question of environment {NAME}", question_id, list(self._tasks)[:1000])
        return self._tasks[question_id]

    def _last(self, question_id: str, turns: Sequence[Sequence[int]]) -> Progress:
        self._task(question_id)
        stage = self._stage(question_id)
        return stage.dialogue.last(question_id, len(stage.prompt), turns)

    def _build_stage(self, question_id: str) -> _Stage:
        task, settings = self._task(question_id), self._settings
        tools = {**self._shared_tools, **_tools_of(self._vf, type(task).toolsets(task.config), task.data)}
        messages = [system_message(task.data.system_prompt or "", [_described(name, tool) for name, tool in tools.items()])]
        prompt = task.data.prompt
        given = [self._vf.UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt or [])
        messages += [Message(cast("Role", one.role), _text_of(one.content)) for one in given]
        run_tool = lru_cache(maxsize=1024)(lambda name, arguments: Message("tool", _called(tools[name], json.loads(arguments))))

        def run(call: ToolCall) -> Message | None:
            return run_tool(call.name, json.dumps(call.arguments)) if call.name in tools else None

        dialogue = ToolDialogue(
            self._renderer,
            self.limits,
            max_calls=settings.max_calls,
            run_tool=run,
            answer_of=lambda text: text or None,
            correction=CORRECTION,
            max_corrections=settings.max_corrections,
        )
        return _Stage(task, self._renderer.prompt(messages), messages, dialogue, run)

    def _trace(self, stage: _Stage, turns: Sequence[Sequence[int]]) -> Any:
        """The episode as the package records it: a chain of messages, the sampled ones marked."""
        vf = self._vf
        made = {"system": vf.SystemMessage, "user": vf.UserMessage, "assistant": vf.AssistantMessage}
        told = [(made[message.role](content=message.content), False) for message in stage.messages if message.content]
        for ids in turns:
            turn = read_turn(self._renderer, ids)
            results = [stage.run_tool(call) for call in turn.calls]
            if turn.fault is not None or None in results:
                told.append((vf.AssistantMessage(content=self._renderer.decode(list(ids)[:-1])), True))
                told.append((vf.ToolMessage(tool_call_id="", content=CORRECTION.content), False))
                continue
            calls = [
                vf.ToolCall(id=f"call_{len(told)}_{number}", name=call.name, arguments=json.dumps(call.arguments))
                for number, call in enumerate(turn.calls)
            ]
            told.append((vf.AssistantMessage(content=turn.text, tool_calls=calls or None), True))
            for call, result in zip(calls, cast("list[Message]", results), strict=True):
                told.append((vf.ToolMessage(tool_call_id=call.id, content=result.content, name=call.name), False))
        nodes = [
            vf.MessageNode(parent=number - 1 if number else None, message=message, sampled=sampled)
            for number, (message, sampled) in enumerate(told)
        ]
        task = vf.TraceTask(type=type(stage.task).__name__, data=stage.task.data)
        return vf.Trace(task=task, agent=vf.AgentInfo(config=vf.AgentConfig()), nodes=nodes)


def create(settings: Mapping[str, Setting], tokenizer_json: bytes) -> VerifiersEnvironment:
    """The environment of a run. Raises MissingExtraError without the package, ConfigError for a taskset that cannot run here."""
    return VerifiersEnvironment(read_settings(NAME, VerifiersSettings, settings), tokenizer_json)


def _load(settings: VerifiersSettings) -> tuple[Any, Any]:
    """The package and the taskset, bounded."""
    if not settings.taskset:
        raise ConfigError(f"environment {NAME}: no taskset is named", hint='set taskset = "the module that exports it"')
    try:
        vf: Any = importlib.import_module("verifiers.v1")
    except ImportError as error:
        raise MissingExtraError(
            f"environment {NAME}: the package verifiers is not installed", hint="run `pip install verifiers==0.4.0`"
        ) from error
    try:
        config = json.loads(settings.config)
        taskset = vf.load_taskset(vf.taskset_config_type(settings.taskset).model_validate({**config, "id": settings.taskset}))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"environment {NAME}: taskset {settings.taskset!r} cannot be loaded: {error}",
            hint="name an installed module whose __all__ has the Taskset, and its config as JSON",
        ) from error
    if settings.num_tasks:
        taskset = taskset.take(settings.num_tasks)
    if not taskset.bounded:
        raise ConfigError(f"environment {NAME}: taskset {settings.taskset!r} has no end", hint="say how many tasks to take: num_tasks")
    return vf, taskset


def _refuse_unfit(vf: Any, name: str, taskset: Any, task: Any) -> None:
    """Raise ConfigError if a taskset needs what there is not here."""
    if task is None:
        raise ConfigError(f"environment {NAME}: taskset {name!r} has no task", hint="look at its config")
    kind, scorers = type(task), (*task.hooks("reward"), *task.hooks("metric"))
    needs = {
        "a container": kind.NEEDS_CONTAINER,
        "a set-up in a runtime": kind.setup is not vf.Task.setup or kind.finalize is not vf.Task.finalize,
        "a judge": bool(task.config.judges),
        "a stop condition": bool(task.hooks("stop")),
        "a runtime to score in": any("runtime" in inspect.signature(one).parameters for one in scorers),
        "its rewards and metrics to be coroutines (async def)": not all(map(inspect.iscoroutinefunction, scorers)),
        "a user to talk to": task.data.prompt is None,
    }
    for what, needed in needs.items():
        if needed:
            raise ConfigError(
                f"environment {NAME}: taskset {name!r} needs {what}", hint="tasksets whose tools and rewards are plain Python run here"
            )


def _tools_of(vf: Any, toolsets: Sequence[Any], data: Any) -> dict[str, Callable[..., object]]:
    """The tools of these toolsets under the names the package would give them, each checking its arguments."""
    from pydantic import validate_call  # noqa: PLC0415 - not before a run asks for this environment

    found: dict[str, Callable[..., object]] = {}
    for toolset in toolsets:
        if getattr(toolset.config, "url", None) or type(toolset.state) is not vf.State:
            raise ConfigError(
                f"environment {NAME}: {type(toolset).__name__} lives on a server, or keeps state", hint="plain tools run here"
            )
        asyncio.run(_set_up(toolset, data))
        prefix = f"{toolset.server_name}_" if toolset.server_name else ""
        kind = type(toolset)
        for tool in (getattr(toolset, one) for one in sorted(dir(kind)) if getattr(getattr(kind, one, None), "tool", False)):
            found[f"{prefix}{getattr(tool, 'tool_name', None) or tool.__name__}"] = validate_call(tool)
    return found


async def _set_up(toolset: Any, data: Any) -> None:
    await toolset.setup()
    if data is not None:
        await toolset.setup_task(data)


def _described(name: str, tool: Callable[..., object]) -> dict[str, object]:
    from pydantic import TypeAdapter  # noqa: PLC0415 - as above

    schema = TypeAdapter(cast("Any", tool)).json_schema()
    return {"name": name, "description": inspect.getdoc(tool) or "", "parameters": schema}


def _called(tool: Callable[..., object], arguments: Mapping[str, Value]) -> str:
    """What a tool says. Its complaint about what it was given is a result too; an outage is InfrastructureFaultError."""
    try:
        result = tool(**arguments)
        if inspect.isawaitable(result):
            result = asyncio.run(_awaited(result))
    except _OUTAGES as error:
        raise InfrastructureFaultError(f"a tool could not reach what it needs: {error}") from error
    except _TOOL_FAULTS as error:
        return f"Error: {' '.join(str(error).split())[:_MOST_FAULT_CHARS] or type(error).__name__}"
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)


def _text_of(content: Any) -> str:
    """The text of a message that may have parts; a part that is none is a ConfigError."""
    if isinstance(content, str):
        return content
    if any(part.type != "text" for part in content):
        raise ConfigError(f"environment {NAME}: a prompt holds a picture", hint="the chat format here is of text alone")
    return "\n".join(part.text for part in content)


async def _awaited(result: Any) -> object:
    return await result
