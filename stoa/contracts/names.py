"""Every name that two processes must spell alike: queues, workflow ids and types, signals, queries, activities.

Plain functions and constants, standard library only: workflows import this module inside Temporal's sandbox.
"""

from typing import Final

# workflow types
RUN_WORKFLOW: Final = "RunWorkflow"
MAC_SESSION: Final = "MacSessionWorkflow"
EVALUATION: Final = "EvaluationWorkflow"

# signals, queries, updates
HELLO: Final = "hello"
GOODBYE: Final = "goodbye"
RUN_STOPPED: Final = "run_stopped"
EVAL_SWEEP: Final = "eval_sweep"
EVAL_PART: Final = "eval_part"
FLEET_EVENT: Final = "fleet_event"
EVAL_DONE: Final = "eval_done"
STATUS_QUERY: Final = "status"
FLEET_QUERY: Final = "fleet"
VERSIONS_QUERY: Final = "versions"
PLAYERS_QUERY: Final = "players"
STANDINGS_QUERY: Final = "standings"
SESSION_QUERY: Final = "session"
STANDING: Final = "standing"
PAUSE: Final = "pause"
RESUME: Final = "resume"
STOP: Final = "stop"
DRAIN: Final = "drain"
SET_ANCHOR_CADENCE: Final = "set_anchor_cadence"
QUARANTINE: Final = "quarantine"
DRAIN_MAC: Final = "drain_mac"
EVALUATE: Final = "evaluate"
RELEASE: Final = "release"

# activities
FIND_LEASE: Final = "find_lease"
ACQUIRE_TRAINER: Final = "acquire_trainer"
TRAIN_STEP: Final = "train_step"
PUBLISH: Final = "publish"
CHECKPOINT: Final = "checkpoint"
SWEEP: Final = "sweep"
NOTICE: Final = "notice"
ADMIT_MAC: Final = "admit_mac"
TELL_MAC: Final = "tell_mac"
CENSUS: Final = "census"
GRANT_SWEEP: Final = "grant_sweep"
NOTIFY_RUN: Final = "notify_run"
SET_HEAD_STATE: Final = "set_head_state"
START_EVALUATION: Final = "start_evaluation"
LIST_MACS: Final = "list_macs"
HELD_OUT: Final = "held_out"
SUMMARISE_EVALUATION: Final = "summarise_evaluation"
REPORT_EVALUATION: Final = "report_evaluation"
RELEASE_MACS: Final = "release_macs"

# search attributes: name -> Temporal type
SEARCH_ATTRIBUTES: Final = {
    "RlRun": "Keyword",
    "RlHost": "Keyword",
    "RlState": "Keyword",
    "RlVersion": "Int",
    "RlMacs": "Int",
    "RlReward": "Double",
}

MAX_MESSAGE_BYTES: Final = 16 * 1024
"""Limit of one message across Temporal; RunWorkflow's carried state has its own."""
MAX_RUN_STATE_BYTES: Final = 256 * 1024

OLDEST_MAC_BUILD: Final = "0.1.0"
"""Builds of the Mac worker below this one write what today's trainer cannot read."""
MEMO: Final = "mac"
"""Key of a session's memo, which the census reads: a `MacFacts`."""


def control_queue(run: str) -> str:
    """Queue of workflows and control activities of one run."""
    return f"rl-ctl-{run}"


def gpu_queue(run: str) -> str:
    """Queue every trainer candidate polls, for `acquire_trainer` only."""
    return f"gpu-{run}"


def lease_queue(run: str, token: int) -> str:
    """Queue only the holder of lease `token` polls: train_step, publish, checkpoint."""
    return f"gpu-{run}-e{token}"


def mac_queue(run: str, host: str) -> str:
    """Queue of one Mac's sweeps."""
    return f"mac-{run}-{host}"


def run_workflow_id(run: str) -> str:
    """Id of the RunWorkflow of a run."""
    return f"run-{run}"


def session_workflow_id(run: str, host: str) -> str:
    """Id of a Mac's session in a run."""
    return f"mac-{run}-{host}"


def evaluation_workflow_id(run: str, evaluation: str) -> str:
    """Id of one evaluation of a run."""
    return f"eval-{run}-{evaluation}"
