"""How the first Mac's process of a wired set says how it ended, for who started it: a small file.

Who starts the set again, and when, is `launch.py`'s business.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

LOST: Final = 75
"""Exit code: one of the set is lost."""
ANEW: Final = 76
"""Exit code: nothing is lost, and the whole is to begin anew."""


@dataclass(frozen=True, slots=True)
class Ended:
    """`code`: of the worker, None if it did not say. `lost`: a reason to begin again; "" if there is none."""

    code: int | None
    lost: str = ""


def tell(path: Path, ended: Ended) -> None:
    """Write it; whoever looks finds all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(asdict(ended)), "utf-8")
    part.replace(path)


def read(path: Path) -> Ended:
    """What was said; nothing, if nothing was."""
    try:
        found = json.loads(path.read_text("utf-8"))
        return Ended(int(found["code"]), str(found["lost"]))
    except (OSError, ValueError, KeyError, TypeError):
        return Ended(None)
