"""What runs only where there is CUDA: parity and one step there. Elsewhere every test here is skipped, with the reason."""

import pytest
import torch

from tests.unit.trainer_gpu.conftest import dense_folder, dense_hub, ids, megatron_process, moe_folder, moe_hub

__all__ = ["dense_folder", "dense_hub", "ids", "megatron_process", "moe_folder", "moe_hub"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs CUDA where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if "tests/gpu/" in str(item.path):
                item.add_marker(pytest.mark.skip(reason="needs CUDA, which torch does not find on this machine"))
