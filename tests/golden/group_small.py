"""Writes group-small.safetensors.zst from group-small.json by the byte table of the format, without the project's codec.

Run `python tests/golden/group_small.py` after a deliberate change of the format. Tests compare the codec with both files.
"""

import json
import struct
from pathlib import Path

import zstandard

FOLDER = Path(__file__).parent
CODES = {"I64": "<q", "F32": "<f", "I32": "<i", "U8": "<B"}
"""Types in the order in which the safetensors package writes them: by falling size, floats first."""


def content(known: dict) -> bytes:
    """The safetensors file of the known contents: tensors by type, then by name."""
    place = {name: (list(CODES).index(tensor["dtype"]), name) for name, tensor in known["tensors"].items()}
    header: dict = {"__metadata__": {"group": json.dumps(known["document"], sort_keys=True, separators=(",", ":"))}}
    body = b""
    for name in sorted(place, key=lambda name: place[name]):
        tensor = known["tensors"][name]
        data = b"".join(struct.pack(CODES[tensor["dtype"]], value) for value in tensor["values"])
        header[name] = {"dtype": tensor["dtype"], "shape": tensor["shape"], "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + body


if __name__ == "__main__":
    data = content(json.loads((FOLDER / "group-small.json").read_text()))
    frame = zstandard.ZstdCompressor(level=3, write_checksum=True).compress(data)
    (FOLDER / "group-small.safetensors.zst").write_bytes(frame)
