"""The page of JSON keys: it has every command that prints JSON, and what they print has its keys."""

import json
from dataclasses import fields
from pathlib import Path

import pytest

from cli.doctor.checks import as_json
from cli.doctor.finding import good, warn
from cli.main import build, run
from cli.outputs import OUTPUTS, load
from stoa.config.load import DEFAULT_CONFIG
from tests.cli.test_help import ACTS, NAMES, leaves


def test_every_command_with_json_has_its_keys_listed() -> None:
    app = build()
    found = {name for word in NAMES for name, _ in leaves(app[word], word)}
    assert set(OUTPUTS) == (found - set(ACTS)) | {"bench"}, "`stoa bench` is one and has others under it"


@pytest.mark.parametrize("name", sorted(OUTPUTS))
def test_class_of_an_output_is_there_and_no_key_is_told_twice(name: str) -> None:
    output = OUTPUTS[name]
    num_fields = len(fields(load(output.kind))) if output.kind else 0
    assert len(output.keys()) == len(output.own) + num_fields - len(output.without)
    assert set(output.rows) <= set(output.own)


def test_config_check_prints_what_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed = OUTPUTS["config check"].keys()
    assert run(["config", "check", str(DEFAULT_CONFIG), "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == listed
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("sede = 1\n")
    assert run(["config", "check", str(wrong), "--json"]) == 2
    assert set(json.loads(capsys.readouterr().out)) == listed - {"weights_bytes", "settings"}


def test_doctor_prints_what_is_listed() -> None:
    tree = json.loads(as_json([good("a", "fine"), warn("b", "not so", "mend it")], 1.0))
    assert set(tree) == OUTPUTS["doctor"].keys()
