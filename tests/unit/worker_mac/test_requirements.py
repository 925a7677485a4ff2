"""What users of such workers complained of, and the tests that say it cannot happen here; and what must not load MLX."""

import ast
import re
import subprocess
import sys

import mlx.core as mx
import pytest

from stoa.config.load import PROJECT_ROOT
from worker_mac.memory import CACHE_BYTES

UNIT, MAC = "tests/unit", "tests/unit/worker_mac"
COVERED: dict[str, tuple[str, tuple[str, ...]]] = {
    "R1": (
        "logprobs in the model's type and of another distribution than the one sampled",
        (
            f"{MAC}/test_sampler.py::test_logprob_is_that_of_a_float64_log_softmax",
            f"{MAC}/test_sweep.py::test_logprobs_are_those_of_a_float64_forward_over_the_whole_episode",
            f"{MAC}/test_decoder.py::test_a_temperature_and_filters_are_drawn_by_and_their_logprob_is_given",
        ),
    ),
    "R2": (
        "output that depends on who else is in the batch",
        (
            f"{MAC}/test_sweep.py::test_an_episode_is_bit_identical_alone_in_64_in_any_order_and_parked_and_resumed",
            f"{MAC}/test_kernels.py::test_an_episode_alone_has_the_bits_it_has_in_a_group_and_among_others",
            f"{UNIT}/metal/test_kernels_on_emulator.py::test_rows_have_the_same_bits_alone_and_in_64",
        ),
    ),
    "R3": (
        "wrong rows in a batch of several",
        (
            f"{MAC}/test_selftest.py::test_a_planted_fault_is_named",
            f"{MAC}/test_decoder.py::test_self_test_finds_rows_that_depend_on_their_batch",
            f"{UNIT}/cli/test_doctor.py::test_packages_are_compared_with_what_is_asked_and_what_was_tested",
        ),
    ),
    "R4": (
        "a pool that is copied where it should be written in place",
        (
            f"{MAC}/test_decoder.py::test_appending_to_pages_copies_no_pool",
            f"{MAC}/test_selftest.py::test_this_machine_passes_and_says_what_it_is",
        ),
    ),
    "R5": ("buffers that are never freed", (f"{MAC}/test_decoder.py::test_memory_after_sweeps_is_what_it_was_before",)),
    "R6": ("responses that hold a cache", (f"{MAC}/test_engine.py::test_memory_after_a_sweep_is_what_it_was_before",)),
    "R7": (
        "a buffer cache that fills the memory",
        (f"{MAC}/test_requirements.py::test_what_mlx_may_keep_and_take_is_bounded",),
    ),
    "R8": (
        "a Mac that freezes because everything is wired, or crawls because nothing is",
        (
            f"{MAC}/test_senses.py::test_no_more_is_wired_than_is_planned_nor_than_is_allowed",
            f"{MAC}/test_senses.py::test_the_wired_limit_is_put_back_however_the_block_ends",
        ),
    ),
    "R9": (
        "a Mac that crashes again and again",
        (
            f"{MAC}/test_panics.py::test_a_crash_while_at_work_is_noticed_at_the_next_start_and_forgiven_after_a_day",
            f"{MAC}/test_panics.py::test_the_second_crash_in_a_day_stays_off_until_a_person_wants_it_again",
            f"{MAC}/test_ending.py::test_after_two_crashes_of_the_mac_the_worker_stays_off_and_says_so",
            f"{MAC}/test_guest.py::test_after_a_crash_the_pool_is_half_as_large_and_every_group_is_played",
        ),
    ),
    "R10": (
        "a second program on the GPU",
        (
            f"{MAC}/test_requirements.py::test_only_the_engines_process_loads_mlx",
            f"{MAC}/test_worker.py::test_a_state_folder_belongs_to_one_worker",
            f"{UNIT}/cli/test_doctor.py::test_a_second_program_with_mlx_is_found_here_and_ones_own_is_not",
        ),
    ),
    "R11": (
        "work that the system ends because it keeps the display waiting",
        (
            f"{MAC}/test_pace.py::test_steps_settle_at_or_below_a_quarter_of_a_second",
            f"{MAC}/test_schedule.py::test_a_step_the_system_ended_costs_no_episode_and_is_tried_with_fewer_tokens",
            f"{MAC}/test_decoder.py::test_work_that_the_system_ended_is_told_from_other_failures",
        ),
    ),
    "R12": (
        "a Mac that crashes when it sleeps with memory wired",
        (
            f"{MAC}/test_sleeps.py::test_the_system_is_answered_once_we_are_still_and_waking_is_told",
            f"{MAC}/test_guest.py::test_before_sleep_the_sweep_ends_within_a_step_and_after_it_a_moment_passes",
            "tests/loop/test_mac_signals.py::test_a_mac_that_is_put_to_sleep_is_still_before_and_begins_anew_after",
        ),
    ),
    "R13": (
        "a hot Mac that is taken for a broken one",
        (
            f"{MAC}/test_guest.py::test_a_hot_mac_rests_goes_on_and_reports_its_heat",
            f"{UNIT}/workflows/test_session_plan.py::test_a_mac_that_is_slow_because_it_is_hot_says_so_and_keeps_its_sweeps",
            f"{UNIT}/workflows/test_session_plan.py::test_slow_sweep_is_redone_without_sending_the_mac_away",
        ),
    ),
    "R14": (
        "MLX called from a thread that is not its own",
        (f"{MAC}/test_uploader.py::test_only_bytes_are_taken", f"{MAC}/test_requirements.py::test_only_the_engines_process_loads_mlx"),
    ),
    "R15": (
        "out of memory because a batch had no bound",
        (
            f"{MAC}/test_memory.py::test_plans_keep_within_memory_and_grow_with_it",
            f"{MAC}/test_schedule.py::test_the_youngest_are_parked_when_pages_run_out_and_the_oldest_group_ends_first",
            f"{UNIT}/cli/test_doctor.py::test_memory_has_room_for_weights_and_groups",
        ),
    ),
    "R16": (
        "ties of the router that go one way here and another there",
        (f"{UNIT}/metal/test_router.py::test_equal_scores_go_to_the_lowest_index",),
    ),
    "R17": (
        "a router that differs between sampler and trainer",
        (f"{MAC}/test_sweep.py::test_recorded_routing_is_that_of_a_float64_forward_and_survives_bytes",),
    ),
    "R18": (
        "numbers that change with a version of MLX",
        (
            f"{MAC}/test_fingerprint.py::test_the_last_bit_of_one_logprob_is_another_fingerprint",
            f"{UNIT}/rollouts/test_admit.py::test_only_engines_that_the_run_names_are_taken_if_it_names_any",
        ),
    ),
    "R19": (
        "pages of other weights, or with two writers",
        (
            f"{MAC}/test_pages.py::test_another_version_page_size_or_type_finds_an_empty_pool",
            f"{MAC}/test_pages.py::test_a_shared_tail_page_is_copied_by_whoever_writes_it_and_full_pages_never",
        ),
    ),
    # R20 is of several Macs wired together, which are no worker yet.
}
APART = (
    "uploader", "guest", "power", "senses", "holds", "limits", "panics", "sleeps", "service", "identity", "invited", "membership",
    "ending", "worker", "pages", "plan", "schedule", "pace", "memory", "width", "model_config",
)  # fmt: skip
"""Modules of the worker that threads beside the engine's, the command line and the doctor may use."""


@pytest.mark.parametrize("requirement", COVERED)
def test_each_complaint_has_tests_that_are_there(requirement: str) -> None:
    complaint, tests = COVERED[requirement]
    assert complaint and tests
    for test in tests:
        path, _, name = test.partition("::")
        found = {
            node.name
            for node in ast.walk(ast.parse((PROJECT_ROOT / path).read_text()))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        assert name in found, test


def test_all_complaints_but_those_of_wired_macs_are_in_the_table() -> None:
    assert [int(re.sub(r"\D", "", name)) for name in COVERED] == list(range(1, 20))


def test_only_the_engines_process_loads_mlx() -> None:
    modules = [f"worker_mac.{name}" for name in APART]
    modules += ["cli.main", "cli.bench", "cli.doctor.checks", "cli.commands.join", "cli.commands.doctor"]
    code = (
        "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]; "
        "print(sorted(m for m in sys.modules if m.split('.')[0] == 'mlx'))"
    )
    done = subprocess.run([sys.executable, "-c", code, *modules], capture_output=True, text=True, timeout=55, cwd=PROJECT_ROOT)
    assert done.stdout.strip() == "[]", done.stderr


def test_what_mlx_may_keep_and_take_is_bounded() -> None:
    import worker_mac.player as player

    assert CACHE_BYTES <= 256 << 20
    before = mx.set_memory_limit(1 << 40)
    try:
        player.bound_memory(3 << 30)
        assert mx.set_memory_limit(1 << 40) == 3 << 30
        assert mx.set_cache_limit(CACHE_BYTES) == CACHE_BYTES
        player.bound_memory(None)
        assert mx.set_memory_limit(1 << 40) == 1 << 40
    finally:
        mx.set_memory_limit(before)
