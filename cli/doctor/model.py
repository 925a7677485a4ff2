"""The model: does MLX compute rightly here, and do our prompts equal those of the checkpoint's own chat template?

MLX runs in a process of its own, so that this command never is a second program on the GPU beside a worker.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final, cast

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from cli.doctor.finding import Finding, bad, good, warn
from cli.doctor.machine import other_programs
from cli.doctor.scene import Scene
from cli.say import bytes_text
from stoa.chat.render import ChatRenderer, Message
from stoa.weights.layout import layout_of
from worker_mac.identity import lock_holder
from worker_mac.model_config import read_model_config

MODEL: Final = "model"
SELF_TEST: Final = "self-test"
KERNELS: Final = "kernels"
TEMPLATE: Final = "chat template"
TEST_SECONDS: Final = 8.0
_SAID: Final = "I do not know."
DIALOGUES: Final[tuple[tuple[Message, ...], ...]] = (
    (Message("user", "Who wrote it?"),),
    (Message("system", "Be brief.\nUse tools."), Message("user", "  Crohn's disease: 3 < 4 & <b>?\n")),
)


def check_model(scene: Scene) -> Finding:
    """Is the model known here, and one that this project trains and plays?"""
    if scene.model_config is None:
        name = scene.config.model
        return warn(MODEL, f"{name} is not on this machine yet", "a trainer fetches it, a Mac gets it with the run: nothing to do")
    layout = layout_of(scene.model_config, scene.config.learning.dtype)  # raises what is wrong
    if scene.is_mac:
        read_model_config(scene.model_config)
    return good(MODEL, f"{layout.num_codes + layout.num_raw:,} parameters, {bytes_text(layout.num_bytes)} in int8")


def check_self_test(scene: Scene) -> Finding | None:
    """MLX on this machine, unless a worker has it at work, which tested itself at its start."""
    if not scene.is_mac:
        return None
    found = _untested(scene) or scene.once(_ask_self_test)
    if isinstance(found, Finding):
        return found
    if found.fault:
        return bad(SELF_TEST, found.fault, "install the MLX that the extra `mac` names")
    return good(SELF_TEST, f"MLX computes rightly to {found.difference:.1g} nats on {found.device}, fingerprint {found.fingerprint}")


def check_kernels(scene: Scene) -> Finding | None:
    """What became of each Metal kernel in the self-test, where that is made."""
    if not scene.is_mac or _untested(scene) is not None:
        return None
    found = scene.once(_ask_self_test)
    return None if isinstance(found, Finding) else kernels_finding(found.kernels, scene.allowed.plain_ops)


def _untested(scene: Scene) -> Finding | None:
    """Why the self-test is not made; None if it is."""
    if find_spec("mlx") is None:
        return bad(SELF_TEST, "MLX is not installed", "run `pip install 'stoa[mac]'`")
    holder = lock_holder(scene.folder)
    if holder is not None:
        return good(SELF_TEST, f"not repeated beside process {holder}, which passed its own")
    if sys.platform == "darwin" and other_programs(ignore=0):
        return warn(SELF_TEST, "not made: another program uses the GPU", "end it and ask again; a worker tests itself at its start")
    return None


def kernels_finding(kernels: Mapping[str, str], plain_ops: Sequence[str]) -> Finding:
    """The row of kernels. `kernels`: each with why it is not used, or ""; `plain_ops`: what the Mac's owner switched off."""
    off = "".join(f"; {name} is switched off in mac.toml" for name in plain_ops)
    refused = {name: reason for name, reason in kernels.items() if reason and name not in plain_ops}
    if refused and set(refused.values()) == {"no Metal back end"}:
        return good(KERNELS, f"no Metal back end: MLX's own operations compute everything{off}")
    used = [name for name, reason in kernels.items() if not reason and name not in plain_ops]
    compute = f"{', '.join(used)}: as MLX's own operations" if used else "none is used"
    if not refused:
        return good(KERNELS, compute + off)
    why = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
    return warn(KERNELS, f"{compute}{off}; not used are {why}", "nothing to do: MLX's own operations take their place, only slower")


@dataclass(frozen=True, slots=True)
class _Tested:
    """What `worker_mac.selftest` printed; kernels: each with why it is not used, or ""."""

    fault: str
    difference: float
    device: str
    fingerprint: str
    kernels: Mapping[str, str]


def _ask_self_test() -> Finding | _Tested:
    """The self-test, in a process of its own."""
    command = [sys.executable, "-m", "worker_mac.selftest"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TEST_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return bad(SELF_TEST, f"no answer in {TEST_SECONDS:g} s", "ask again when less runs here; if it stays so, restart the machine")
    try:
        found = json.loads(done.stdout)
    except ValueError:
        return bad(SELF_TEST, f"MLX cannot be loaded: {_last_line(done.stderr)}", "run `pip install 'stoa[mac]'` again")
    kernels = {str(one["kernel"]): str(one["reason"]) for one in found["kernels"]}
    return _Tested(str(found["fault"]), float(found["difference"]), str(found["device"]), str(found["fingerprint"]), kernels)


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "it ended without a word"


def check_template(scene: Scene) -> Finding | None:
    """Our ids of two dialogues and of a tool's answer against the template that came with the checkpoint."""
    folder = scene.model_folder
    if folder is None:
        return None
    template = template_of(folder)
    if template is None:
        return good(TEMPLATE, "the checkpoint brings none: the task's own words are used")
    tokenizer_json = (folder / "tokenizer.json").read_bytes()
    difference = compare(template, tokenizer_json)
    if difference:
        return bad(TEMPLATE, difference, "this checkpoint talks in another form than LFM2's: use one of that family")
    return good(TEMPLATE, "our prompts are the checkpoint's own, token for token")


@dataclass(frozen=True, slots=True)
class Template:
    """A checkpoint's chat template; `names`: what it may call its special tokens by, as bos_token."""

    source: str
    names: Mapping[str, str]


def template_of(folder: Path) -> Template | None:
    """The checkpoint's chat template; None if it has none."""
    path = folder / "tokenizer_config.json"
    tree: object = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    settings = cast(Mapping[str, object], tree if isinstance(tree, dict) else {})
    apart = folder / "chat_template.jinja"
    source = apart.read_text("utf-8") if apart.is_file() else settings.get("chat_template")
    names = {name: _text_of(value) for name, value in settings.items() if name.endswith("_token")}
    return Template(source, names) if isinstance(source, str) else None


def _text_of(token: object) -> str:
    """A special token, which stands as text or as a table with its text."""
    return str(cast(Mapping[str, object], token).get("content", "")) if isinstance(token, dict) else str(token or "")


def compare(template: Template, tokenizer_json: bytes) -> str:
    """Where our ids first differ from the template's; "" if they are the same."""
    renderer, tokenizer = ChatRenderer(tokenizer_json), Tokenizer.from_str(tokenizer_json.decode("utf-8"))
    call = '<|tool_call_start|>[search(query="Who?")]<|tool_call_end|>'
    for dialogue in DIALOGUES:
        ours = list(renderer.prompt(dialogue))
        for said in (_SAID, call):
            answer = Message("tool", "one\ntwo")
            turned = [*ours, *tokenizer.encode(said, add_special_tokens=False).ids, renderer.special.im_end, *renderer.follow([answer])]
            for messages, ids in ((dialogue, ours), ((*dialogue, Message("assistant", said), answer), turned)):
                try:
                    theirs = tokenizer.encode(render(template, messages), add_special_tokens=False).ids
                except TemplateError as error:
                    return f"the checkpoint's template refuses a dialogue of {len(messages)} messages: {error}"
                if theirs != ids:
                    return _first_difference(ids, theirs, tokenizer)
    return ""


def render(template: Template, messages: Sequence[Message]) -> str:
    """A dialogue as the template writes it, with the opening of the next turn. Templates come from strangers: sandboxed."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    told = [{"role": message.role, "content": message.content} for message in messages]
    found = environment.from_string(template.source, {"raise_exception": _refuse})
    return found.render(messages=told, add_generation_prompt=True, tools=None, **template.names)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _first_difference(ours: Sequence[int], theirs: Sequence[int], tokenizer: Tokenizer) -> str:
    at = next((place for place, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), min(len(ours), len(theirs)))
    here, there = (tokenizer.decode(list(ids[at : at + 6]), skip_special_tokens=False) for ids in (ours, theirs))
    return f"token {at} of a prompt: ours goes on with {here!r}, the checkpoint's template with {there!r}"
