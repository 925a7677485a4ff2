"""The memory plan of the trainer: totals by hand for LFM2.5-8B-A1B, what fits where, and refusals."""

import pytest

from cli.plan.gpu import Line, advice, plan, read_model
from stoa.config.load import PROJECT_ROOT
from stoa.contracts.errors import CheckpointError, UsageError

MODEL = read_model(None)
# 8,467,856,128 parameters, of which 7,751,073,792 in experts: counted from the architecture, independent of the layout.
PARAMETERS, EXPERTS = 8_467_856_128, 7_751_073_792
OTHER = PARAMETERS - EXPERTS


def line(num_gpus: int, size: float, way: str) -> Line:
    return next(line for line in plan(MODEL, num_gpus, size) if line.way.name == way)


def test_parameters_are_those_of_the_architecture() -> None:
    assert (MODEL.num_parameters, MODEL.num_expert, MODEL.num_experts) == (PARAMETERS, EXPERTS, 32)
    assert MODEL.embedding_bytes == 4 * 128_000 * 2048


@pytest.mark.parametrize(
    ("num_gpus", "way", "expected"),
    [
        (1, "Adam in fp32", 18 * PARAMETERS),
        (1, "moments in bf16", 14 * PARAMETERS),
        (1, "bf16 gradients and moments", 12 * PARAMETERS),
        (1, "optimizer on the host", 6 * PARAMETERS),
        (2, "experts shared", 18 * EXPERTS // 2 + 18 * OTHER),
        (8, "experts shared", 18 * EXPERTS // 8 + 18 * OTHER),
        (2, "optimizer sharded", 12 * PARAMETERS),
        (4, "optimizer sharded", 9 * PARAMETERS),
        (8, "optimizer sharded", 6 * PARAMETERS + 12 * PARAMETERS // 8),
        (4, "experts shared, optimizer sharded", 18 * EXPERTS // 4 + 9 * OTHER),
        (8, "experts shared, optimizer sharded", 18 * EXPERTS // 8 + 6 * OTHER + 12 * OTHER // 8),
    ],
)
def test_state_on_a_gpu_is_the_sum_of_its_bytes(num_gpus: int, way: str, expected: int) -> None:
    assert line(num_gpus, 141, way).state_bytes == pytest.approx(expected, abs=4)


def test_state_of_the_known_layouts_in_gigabytes() -> None:
    """102 / 76 / 64 GB with a sharded optimizer on 2 / 4 / 8 GPUs, 78 / 41 / 23 GB with shared experts besides."""
    sharded = [round(line(n, 141, "optimizer sharded").state_bytes / 1e9) for n in (2, 4, 8)]
    both = [round(line(n, 141, "experts shared, optimizer sharded").state_bytes / 1e9) for n in (2, 4, 8)]
    assert (sharded, both) == ([102, 76, 64], [78, 41, 23])


def test_full_state_fits_192_gb_and_not_141_gb() -> None:
    assert line(1, 192, "Adam in fp32").micro_batch_tokens >= 8192
    assert not line(1, 141, "Adam in fp32").fits
    assert advice(plan(MODEL, 1, 192), 8192) == "Adam in fp32"
    assert "does not have" in advice(plan(MODEL, 1, 141), 8192)
    assert advice(plan(MODEL, 2, 141), 8192) == "experts shared"
    assert advice(plan(MODEL, 1, 40), 8192) == "nothing fits"


def test_host_holds_what_was_moved_off_the_gpu_and_the_published_weights_twice() -> None:
    assert line(1, 141, "optimizer on the host").host_bytes == 12 * PARAMETERS + 2 * MODEL.wire_bytes


def test_room_grows_with_memory_and_is_whole_blocks() -> None:
    rooms = [line(2, size, "experts shared").micro_batch_tokens for size in (80, 100, 120, 141, 192)]
    assert rooms == sorted(rooms)
    assert rooms[0] == 0 < rooms[-1]
    assert all(room % 256 == 0 for room in rooms)


def test_experts_are_shared_only_over_a_number_that_divides_them() -> None:
    assert all(not line.way.expert_cut for line in plan(MODEL, 3, 192))
    assert all(not line.way.expert_cut for line in plan(MODEL, 1, 192))


@pytest.mark.parametrize(("num_gpus", "size"), [(0, 80.0), (1, 0.0), (-2, 80.0)])
def test_impossible_machine_is_wrong_use(num_gpus: int, size: float) -> None:
    with pytest.raises(UsageError):
        plan(MODEL, num_gpus, size)


def test_folder_without_a_config_is_told(tmp_path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        read_model(tmp_path)


def test_demo_policy_is_planned_from_its_folder() -> None:
    model = read_model(PROJECT_ROOT / "environments" / "search" / "policy")
    assert (model.num_parameters, model.num_experts) == (284_512, 8)
