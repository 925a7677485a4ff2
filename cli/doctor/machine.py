"""This machine: disk and memory for the model, a worker that runs or has parked itself, other programs with a model, power.

What a Mac's owner allows, and what its senses say now, is decided by the worker's own table.
"""

import getpass
import platform
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

import psutil

from cli.doctor.finding import Finding, bad, good, warn
from cli.doctor.scene import Scene
from cli.say import bytes_text, counted
from stoa.config.host import MacHost
from stoa.config.load import state_base
from worker_mac.guest import GUEST_FILE, said_now
from worker_mac.identity import lock_holder
from worker_mac.memory import USUAL_GROUPS, MemoryPlan, Play, model_bytes, plan_memory
from worker_mac.model_config import read_model_config
from worker_mac.panics import PanicLog
from worker_mac.power import Senses, decide
from worker_mac.senses import probe_here, run_tool
from worker_mac.service import Service

DISK: Final = "disk"
MEMORY: Final = "memory"
WORKER: Final = "worker"
PROGRAMS: Final = "other programs"
POWER: Final = "power"
LONGEST_TOKENS: Final = 4096
"""Of an episode whose task does not say."""
HOME_BYTES_A_PARAMETER: Final = 5
"""A trainer's host keeps the base checkpoint (2), a mirror of the published weights and what is on its way (1.06 each)."""
_MLX: Final = re.compile(r"/libmlx\.(dylib|so)")
_MODEL_PROGRAMS: Final = ("ollama", "lm studio", "llama-server", "exo")
_SLEEP_DISABLED: Final = re.compile(r"^\s*SleepDisabled\s+1", re.MULTILINE)
AGENTS: Final = Path.home() / "Library" / "LaunchAgents"


def check_disk(scene: Scene) -> Finding:
    """Room for the weights, and on a Mac for what its owner lets it keep."""
    place = scene.folder if scene.is_mac else state_base()
    while not place.exists():
        place = place.parent
    free = psutil.disk_usage(str(place)).free
    said = f"{bytes_text(free)} free at {place}"
    if scene.layout is None:
        return good(DISK, f"{said}; the model is not known here yet")
    weights = scene.layout.num_bytes
    if not scene.is_mac:
        need = HOME_BYTES_A_PARAMETER * (scene.layout.num_codes + scene.layout.num_raw)
        fix = "make room, or set STOA_STATE to another disk"
        return good(DISK, said) if free >= need else bad(DISK, f"{said}; the trainer's host needs {bytes_text(need)}", fix)
    allowed = scene.allowed
    fix = "make room, or keep the state on another disk with --state"
    here = _size(scene.folder / "runs")
    least, most = weights + allowed.free_disk_bytes, max(allowed.cache_bytes, weights) + allowed.spool_bytes + allowed.free_disk_bytes
    if free + here < least:
        return bad(DISK, f"{said}; weights of {bytes_text(weights)} would leave less than {bytes_text(allowed.free_disk_bytes)}", fix)
    if free + here < most:
        return warn(DISK, f"{said}; cache and spool may grow until nothing new is played", f"{fix}, or lower cache_bytes in mac.toml")
    return good(DISK, f"{said}; weights take {bytes_text(weights)}, cache and spool at most {bytes_text(most - allowed.free_disk_bytes)}")


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def check_memory(scene: Scene) -> Finding | None:
    """Room for the weights and the groups of a sweep, by the plan that the worker makes."""
    plan = memory_plan(scene)
    if not scene.is_mac or plan is None:
        return None
    memory, limit = psutil.virtual_memory(), our_bytes(scene)
    said = f"{bytes_text(memory.total)}, of which {bytes_text(limit)} may be ours: weights {bytes_text(plan.weights_bytes)}"
    if plan.weights_bytes + plan.step_bytes > limit:
        return bad(MEMORY, f"{said}: it does not fit", "use a Mac with more memory, or wire several together")
    said += f", a sweep {bytes_text(plan.total_bytes - plan.weights_bytes)} for {counted(plan.groups, 'group')} at once"
    if memory.available < plan.weights_bytes + plan.step_bytes:
        return warn(MEMORY, f"{said}; only {bytes_text(memory.available)} are free now", "close programs that take much memory")
    return good(MEMORY, said)


def memory_plan(scene: Scene, most_groups: int = USUAL_GROUPS) -> MemoryPlan | None:
    """The widest sweep that fits here, episodes at their longest; None if the model is not known."""
    if scene.layout is None or scene.model_config is None:
        return None
    size = 4 if scene.settings.learning.dtype == "float32" else 2
    shapes = model_bytes(read_model_config(scene.model_config), scene.layout, item_bytes=size, activation_bytes=size)
    play = Play(scene.settings.rollout.group_size, longest_tokens(scene))
    return plan_memory(shapes, play, most_groups=most_groups, memory_bytes=our_bytes(scene))


def longest_tokens(scene: Scene) -> int:
    """Tokens of an episode at most, as the settings say; else more than those of the usual tasks."""
    return int(str(scene.settings.environment.settings.get("max_episode_tokens", LONGEST_TOKENS)))


def our_bytes(scene: Scene) -> int:
    """What the Mac's owner lets weights and pages take."""
    return int(gpu_bytes(psutil.virtual_memory().total) * scene.allowed.memory_fraction)


def gpu_bytes(total_bytes: int, tool: Callable[[tuple[str, ...]], str] = run_tool, platform_name: str = sys.platform) -> int:
    """What the system lets its GPU have: what its owner set, else about what macOS recommends; elsewhere all there is."""
    if platform_name != "darwin":
        return total_bytes
    given = tool(("sysctl", "-n", "iogpu.wired_limit_mb")).strip()
    if given.isdecimal() and int(given):
        return int(given) << 20
    return int(total_bytes * (0.67 if total_bytes <= 36 << 30 else 0.75))


def check_worker(scene: Scene, service: Service | None = None) -> Finding | None:
    """Is a worker at work on this folder, does it start at log-in (by `service`, else this Mac's), and has it given up?"""
    if not scene.is_mac:
        return None
    caution = PanicLog(scene.folder).look()
    if service is None and sys.platform == "darwin":
        service = Service(AGENTS, scene.folder)
    agent = None if service is None else service.status()
    parked = caution.stays_off or ("" if agent is None else agent.parked)
    again = "mend that, then `stoa leave` and join again"
    if parked:
        return bad(WORKER, f"it has parked itself: {parked}", again)
    if caution.share < 1.0:
        return warn(WORKER, "this Mac crashed lately while groups were played; for a day it plays fewer at once", "install updates")
    holder = lock_holder(scene.folder)
    starts = "" if agent is None or not agent.installed else "; it starts at log-in"
    if holder is not None:
        doing = said_now(scene.folder / GUEST_FILE, holder)
        return good(WORKER, f"process {holder} works with {scene.folder}{starts}" + (f"; it {doing}" if doing else ""))
    if agent is not None and agent.loaded and not agent.pid and agent.last_exit not in ("", "0", "(never exited)"):
        return warn(WORKER, f"the log-in worker ended with {agent.last_exit}{starts}", f"see {scene.folder / 'worker.log'}")
    return good(WORKER, f"none runs with {scene.folder}{starts}")


def check_programs(scene: Scene) -> Finding | None:
    """A second program with a model: on a Mac's GPU two have crashed it, elsewhere it takes processor and memory."""
    if not scene.is_mac:
        return None
    return programs_finding(other_programs(ignore=lock_holder(scene.folder) or 0))


def programs_finding(found: Mapping[int, str], platform_name: str = sys.platform) -> Finding:
    """The row of other programs. `found`: process id -> name."""
    if not found:
        return good(PROGRAMS, "no other program uses MLX")
    named = ", ".join(f"{name} (process {pid})" for pid, name in sorted(found.items())[:4])
    named += f" and {len(found) - 4} more" if len(found) > 4 else ""
    if platform_name == "darwin":
        return warn(PROGRAMS, f"on the GPU besides us: {named}", "end them while groups are played: two have crashed Macs")
    return warn(
        PROGRAMS,
        f"on this processor besides us, with MLX or a model: {named}",
        "nothing to do if they are workers of yours: each is slower for the others",
    )


def other_programs(ignore: int, tool: Callable[[tuple[str, ...]], str] = run_tool, platform_name: str = sys.platform) -> dict[int, str]:
    """Process ids and names of programs of this user that have MLX loaded or are known to serve models."""
    ours = {psutil.Process().pid, ignore}
    listed = mapped_on_mac(tool(("lsof", "-w", "-a", "-u", getpass.getuser(), "-d", "txt", "-Fpcn"))) if platform_name == "darwin" else {}
    for process in psutil.process_iter():
        try:
            name = process.name()
            if name.lower().startswith(_MODEL_PROGRAMS) or (platform_name == "linux" and _maps_mlx(process)):
                listed[process.pid] = name
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return {pid: name for pid, name in listed.items() if pid not in ours and not _descends(pid, ours)}


def mapped_on_mac(text: str) -> dict[int, str]:
    """Processes with MLX's library in memory, by `lsof -F pcn`: lines p<pid>, c<command>, n<file>."""
    found: dict[int, str] = {}
    pid, command = 0, ""
    for line in text.splitlines():
        mark, value = line[:1], line[1:]
        if mark == "p":
            pid = int(value)
        elif mark == "c":
            command = value
        elif mark == "n" and _MLX.search(value):
            found[pid] = command
    return found


def _maps_mlx(process: psutil.Process) -> bool:
    return any(_MLX.search(path) for path in _paths(process))


def _paths(process: psutil.Process) -> Iterable[str]:
    return (str(getattr(one, "path", "")) for one in process.memory_maps())


def _descends(pid: int, ours: set[int]) -> bool:
    try:
        return any(parent.pid in ours - {0, 1} for parent in psutil.Process(pid).parents())
    except psutil.NoSuchProcess:
        return True


def check_power(scene: Scene) -> Finding | None:
    """What the Mac would be allowed now, by its owner's settings and its senses."""
    if not scene.is_mac:
        return None
    if sys.platform != "darwin":
        return good(POWER, "not a Mac: nothing is known of its power and its user, and it plays whenever it is on")
    return power_finding(probe_here().read(), scene.allowed, platform.mac_ver()[0], run_tool(("pmset", "-g")))


def power_finding(senses: Senses, allowed: MacHost, version: str, settings: str) -> Finding:
    """Of a Mac that tells this, on this macOS, whose `pmset -g` prints `settings`."""
    decision = decide(senses, allowed)
    if old_system(version):
        return warn(POWER, f"macOS {version} cannot wire memory: the model may be slow", "update to macOS 15 or later")
    if _SLEEP_DISABLED.search(settings):
        return warn(POWER, "sleep is switched off for this Mac as a whole", "run `sudo pmset disablesleep 0`")
    if not decision.starts:
        return warn(POWER, f"nothing would be played now: {decision.reason}", "wait, or allow it in mac.toml")
    slower = f", half of the time: {decision.reason}" if decision.state == "gentle" else ""
    return good(POWER, f"groups would be played now{slower}; on mains it is kept awake while they are")


def old_system(version: str) -> bool:
    """True for a macOS that cannot wire memory; False for none."""
    major = version.partition(".")[0]
    return major.isdecimal() and int(major) < 15
