"""What stands at the end of a command's help: lines to copy, each with its use. Words only; a test parses every line."""

from typing import Final

EXAMPLES: Final[dict[str, dict[str, str]]] = {
    "": {
        "stoa demo": "the whole thing here, in minutes",
        "stoa run configs/demo.toml": "a run on your servers",
        "stoa status demo": "how it is, and what it waits for",
        "stoa invite demo --host anna": "a token for a friend's Mac",
        "stoa join TOKEN": "on that Mac",
        "stoa export demo out --to mlx": "the newest weights, for mlx_lm",
    },
    "demo": {"stoa demo": "", "stoa demo --workers 3 --minutes 20 --out here": "three Macs' worth of workers, longer"},
    "run": {
        "stoa run configs/demo.toml": "start and follow",
        "stoa run configs/demo.toml --set stop.max_steps=960 --detach": "longer, without following",
        "stoa run configs/demo.toml --resume": "go on with a stopped one",
    },
    "drain": {"stoa drain demo": "use up what is on the way, then end", "stoa drain demo anna --reason moving": "let one Mac leave"},
    "status": {"stoa status demo --follow": "until it has ended", "stoa status demo --json": "for a program"},
    "live": {"stoa live demo": "", "stoa live demo --snapshot live.svg": "one picture, no terminal needed"},
    "episode": {"stoa episode ls demo": "newest version's episodes", "stoa episode ls demo --json": "for a program"},
    "eval": {
        "stoa eval demo": "what was examined so far",
        "stoa eval demo --version 0 --questions 16 --samples 2 --name mine": "examine a version now",
        "stoa eval demo --compare v0-first mine": "are two of them different?",
    },
    "report": {"stoa report demo --out report": "one page that opens offline, beside plots and numbers"},
    "export": {
        "stoa export demo out": "the newest version, for mlx_lm",
        "stoa export demo out --to hf": "the newest checkpoint, for transformers",
    },
    "weights": {"stoa weights ls demo": "versions and sizes", "stoa weights verify demo": "is every byte what was signed?"},
    "join": {
        "stoa join TOKEN": "as a friend's guest, in this window",
        "stoa join --stdin < token.txt": "the token in no list of processes",
        "stoa join --at-login": "again with the token that is kept, at each log-in",
    },
    "invite": {"stoa invite demo --host anna > token.txt": "", "stoa invite demo --host anna --expires 30d": "good for longer"},
    "doctor": {"stoa doctor --role mac": "this Mac, as a worker", "stoa doctor configs/demo.toml --role gpu": "this host, as the trainer"},
    "bench": {
        "stoa bench": "this Mac with the model it has joined for",
        "stoa bench configs/demo.toml": "and its line to that run's bucket",
        "stoa bench kernels": "our Metal kernels",
    },
    "config": {"stoa config check configs/demo.toml": "every fault at once, with its line"},
    "plan": {"stoa plan gpu": "what fits on which machine", "stoa plan fleet --hours 2": "what so many Macs bring"},
}
"""By command, "" for `stoa` itself: line -> what it is for."""


def epilogue(command: str) -> str:
    """The end of a command's help; a blank for one without examples, so that it gets nobody else's."""
    lines = EXAMPLES.get(command, {})
    if not lines:
        return " "
    width = max(len(line) for line in lines)
    said = "Examples:\n" + "\n".join(f"  {line:<{width}}  {use}".rstrip() for line, use in lines.items())
    return said if command else f"{said}\n\n`stoa COMMAND --help` says more; `stoa --help | grep WORD` finds a command"
