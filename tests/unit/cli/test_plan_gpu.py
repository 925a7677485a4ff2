"""The memory plan of the trainer: totals by hand for LFM2.5-8B-A1B, what fits where, and refusals."""

import json

import pytest

from cli.commands.plan import gpu
from cli.plan.gpu import LFM2_5_8B_A1B, WAYS, Line, advice, plan, read_model
from stoa.config.load import PROJECT_ROOT
from stoa.config.run import Learning
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
        (1, "optimizer on the host", 6 * PARAMETERS),
        (2, "experts on every GPU", 12 * PARAMETERS),
        (4, "experts on every GPU", 9 * PARAMETERS),
        (8, "experts on every GPU", 6 * PARAMETERS + 12 * PARAMETERS // 8),
        (4, "Adam in fp32", 18 * EXPERTS // 4 + 9 * OTHER),
        (8, "Adam in fp32", 18 * EXPERTS // 8 + 6 * OTHER + 12 * OTHER // 8),
        (8, "moments in bf16", 14 * EXPERTS // 8 + 6 * OTHER + 8 * OTHER // 8),
        (2, "optimizer on the host", 6 * EXPERTS // 2 + 6 * OTHER),
        # 6 GPUs and 32 experts: two GPUs share a set, three have each set and spread its optimizer.
        (6, "Adam in fp32", 6 * EXPERTS // 2 + 12 * EXPERTS // 6 + 6 * OTHER + 12 * OTHER // 6),
        (3, "Adam in fp32", 6 * PARAMETERS + 12 * PARAMETERS // 3),
    ],
)
def test_state_on_a_gpu_is_the_sum_of_its_bytes(num_gpus: int, way: str, expected: int) -> None:
    assert line(num_gpus, 141, way).state_bytes == pytest.approx(expected, abs=8)


def test_state_of_the_known_layouts_in_gigabytes() -> None:
    """102 / 76 / 64 GB with only the optimizer spread over 2 / 4 / 8 GPUs, 78 / 41 / 23 GB with shared experts besides."""
    spread = [round(line(n, 141, "experts on every GPU").state_bytes / 1e9) for n in (2, 4, 8)]
    both = [round(line(n, 141, "Adam in fp32").state_bytes / 1e9) for n in (2, 4, 8)]
    assert (spread, both) == ([102, 76, 64], [78, 41, 23])


def test_what_fits_on_one_gpu_and_on_several() -> None:
    assert 4096 <= line(1, 192, "Adam in fp32").micro_batch_tokens < 8192
    assert advice(plan(MODEL, 1, 192), 4096) == "Adam in fp32"
    assert advice(plan(MODEL, 1, 192), 8192) == "moments in bf16"
    assert not line(1, 141, "Adam in fp32").fits
    assert 2048 <= line(1, 141, "moments in bf16").micro_batch_tokens < 4096
    assert advice(plan(MODEL, 1, 141), 8192) == "optimizer on the host"
    assert advice(plan(MODEL, 2, 141), 8192) == "Adam in fp32"
    assert advice(plan(MODEL, 1, 40), 8192) == "nothing fits"


def test_host_holds_what_was_moved_off_the_gpu_and_the_published_weights_twice() -> None:
    assert line(1, 141, "optimizer on the host").host_bytes == 12 * PARAMETERS + 2 * MODEL.wire_bytes
    assert line(4, 141, "optimizer on the host").host_bytes == 12 * PARAMETERS + 2 * MODEL.wire_bytes
    assert line(1, 141, "optimizer on the host, moments in bf16").host_bytes == 8 * PARAMETERS + 2 * MODEL.wire_bytes
    assert line(1, 141, "moments in bf16").host_bytes == 2 * MODEL.wire_bytes


def test_gradients_that_pass_through_are_counted() -> None:
    """Of the embedding in fp32, and of one layer's gates and ups in bf16: 32 experts of 2 x 1,792 x 2,048."""
    assert MODEL.block_bytes == 2 * 32 * 2 * 1792 * 2048


def test_every_way_is_a_setting_of_the_trainer() -> None:
    for way in WAYS:
        Learning(dtype="bfloat16", **way.settings)


def test_room_grows_with_memory_and_is_whole_blocks() -> None:
    rooms = [line(2, size, "Adam in fp32").micro_batch_tokens for size in (80, 100, 120, 141, 192)]
    assert rooms == sorted(rooms)
    assert rooms[0] == 0 < rooms[-1]
    assert all(room % 256 == 0 for room in rooms)


@pytest.mark.parametrize(
    ("num_gpus", "size"), [(0, 80.0), (1, 0.0), (-2, 80.0), (1, float("nan")), (1, float("inf")), (1, 1e300), (10**30, 80.0)]
)
def test_impossible_machine_is_wrong_use(num_gpus: int, size: float) -> None:
    with pytest.raises(UsageError):
        plan(MODEL, num_gpus, size)


@pytest.mark.parametrize("tokens", [0, -5, 10**30])
def test_micro_batch_that_cannot_be_is_wrong_use(tokens: int) -> None:
    with pytest.raises(UsageError, match="has 1 to 1,000,000,000"):
        gpu(micro_batch_tokens=tokens)


def test_folder_without_a_config_is_told(tmp_path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        read_model(tmp_path)


def test_demo_policy_is_planned_from_its_folder() -> None:
    model = read_model(PROJECT_ROOT / "environments" / "search" / "policy")
    assert (model.num_parameters, model.num_experts) == (284_512, 8)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("num_hidden_layers", 10**9, "num_hidden_layers is 1000000000, not 1 to 1024"),
        ("hidden_size", 10**30, r"hidden_size is 1e\+30, not 1 to"),
        ("hidden_size", 10**400, "hidden_size is beyond all numbers"),
        ("vocab_size", -5, "vocab_size is -5"),
        ("num_experts", 10**30, "num_experts is"),
        ("num_experts_per_tok", 33, "num_experts_per_tok is 33, not 1 to 32"),
        ("num_experts_per_tok", -4, "num_experts_per_tok is -4"),
        ("num_dense_layers", 25, "num_dense_layers is 25, not 0 to 24"),
        ("conv_L_cache", 0, "conv_L_cache is 0"),
    ],
)
def test_size_that_no_model_has_is_told_at_once(name: str, value: int, said: str, tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LFM2_5_8B_A1B, name: value}))
    with pytest.raises(CheckpointError, match=said):
        read_model(tmp_path)


def test_the_heading_of_a_machine_says_which_way_to_take_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    gpu(gpus=1, memory_gb=192)
    gpu(gpus=1, memory_gb=40)
    said = capsys.readouterr().out.splitlines()
    assert "1 x 192 GB: take 'moments in bf16', the first way below with room for 8,192 tokens" in said
    assert "1 x 40 GB: nothing fits" in said
