"""The only two ways weights cross the bucket: a Publisher puts versions in, a Puller takes them out.

This file is the door: both halves, and the folder a person can open with stock mlx_lm. What each does is in its own file.
"""

from stoa.weights.export import write_mlx_folder
from stoa.weights.history import layout_of_run
from stoa.weights.publisher import Prepared, Publisher, Scanner
from stoa.weights.puller import Puller, Staged

__all__ = ["Prepared", "Publisher", "Puller", "Scanner", "Staged", "layout_of_run", "write_mlx_folder"]
