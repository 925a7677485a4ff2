"""What names exact weights: xxh3-128 of every stored array, and the state_id over the table of them.

xxh3 finds faults (transport, disk, a wrong or repeated delta, a flipped bit anywhere); against a forger stands the
signature over the manifest that carries these digests. A full rescan runs at memory speed, so nothing is incremental.
"""

import hashlib
import json
from collections.abc import Mapping

import numpy as np
import xxhash
from numpy.typing import NDArray

from stoa.contracts.errors import LayoutError
from stoa.contracts.ids import StateId
from stoa.weights.layout import Layout


def array_digest(array: NDArray[np.generic]) -> str:
    """xxh3-128 (32 hex digits) of the array's bytes, which must be C-contiguous and little-endian."""
    if not array.flags.c_contiguous:
        raise LayoutError("only a contiguous array has a digest")
    return xxhash.xxh3_128_hexdigest(array.reshape(-1).view(np.uint8).data)


def state_id_of(layout: Layout, digests: Mapping[str, str]) -> StateId:
    """sha256 (hex) of the canonical table of (array name, type, shape, digest) under the layout's id.

    Raises LayoutError if `digests` names other arrays than the layout.
    """
    if set(digests) != {array.name for array in layout.arrays}:
        raise LayoutError("digests are of other arrays than the layout's")
    table = [[array.name, array.dtype, list(array.shape), digests[array.name]] for array in layout.arrays]
    text = json.dumps([layout.layout_id, table], separators=(",", ":"))
    return StateId(hashlib.sha256(text.encode("ascii")).hexdigest())
