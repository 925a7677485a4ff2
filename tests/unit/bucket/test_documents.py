"""Signed documents and run.json: a known key, canonical form, claims, pins, and the base model's files."""

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from stoa.bucket import keys
from stoa.bucket.manifest import Signer, canonical, verify
from stoa.bucket.run_document import RunDocument, claim_run, fetch_model_files, new_run, read_run, upload_model_files
from stoa.bucket.store import Store
from stoa.config.run import Learning, RunConfig
from stoa.contracts.errors import ConfigError, DigestError, FormatError, RunExistsError, RunMissingError, SignatureError

SIGNER = Signer.from_seed(b"s" * 32)


def test_public_key_of_a_known_seed_is_the_one_of_rfc_8032():
    seed = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
    import base64

    public = base64.b64decode(Signer.from_seed(seed).public_key).hex()
    assert public == "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"


def test_seed_of_another_length_is_a_config_error():
    with pytest.raises(ConfigError, match="32 bytes"):
        Signer.from_seed(b"short")
    assert Signer.from_seed(SIGNER.seed).public_key == SIGNER.public_key


def test_canonical_form_is_sorted_utf8_without_spaces():
    assert canonical({"b": 1, "a": ["ä", 0.5, None, True]}) == '{"a":["ä",0.5,null,true],"b":1}'.encode()
    with pytest.raises(FormatError):
        canonical({"a": float("nan")})


def test_signature_holds_for_any_order_of_fields_and_for_nothing_else():
    document = {"a": 1, "b": "x"}
    signed = {**document, "sig": SIGNER.sign(document)}
    verify(dict(reversed(signed.items())), SIGNER.public_key)
    broken = [
        ({**signed, "a": 2}, SIGNER.public_key),
        ({**signed, "c": 1}, SIGNER.public_key),
        (document, SIGNER.public_key),
        ({**signed, "sig": "not base64!"}, SIGNER.public_key),
        ({**signed, "sig": None}, SIGNER.public_key),
        (signed, Signer.generate().public_key),
        (signed, ""),
        (signed, "AAAA"),
    ]
    for tree, key in broken:
        with pytest.raises(SignatureError):
            verify(tree, key)


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text('{"model_type":"lfm2_moe"}')
    (made / "tokenizer.json").write_text("{}")
    (made / "model.safetensors").write_bytes(b"weights stay here")
    return made


def test_run_is_claimed_once_and_read_back_whole(store: Store, folder):
    files = upload_model_files(store, "demo", folder)
    assert [file.name for file in files] == ["config.json", "tokenizer.json"]
    config = RunConfig(run="demo", learning=Learning(learning_rate=3e-5))
    document = claim_run(store, new_run(config, SIGNER, layout_id="layout", model_files=files), SIGNER)
    assert read_run(store, "demo", SIGNER.public_key) == document
    assert document.config == config
    with pytest.raises(RunExistsError, match="demo") as caught:
        claim_run(store, new_run(config, SIGNER, layout_id="layout", model_files=files), SIGNER)
    assert "--resume" in caught.value.hint


def test_of_several_who_start_a_run_of_one_name_at_once_one_has_it(store: Store, folder):
    files = upload_model_files(store, "demo", folder)
    documents = [new_run(RunConfig(run="demo", seed=seed), SIGNER, layout_id="layout", model_files=files) for seed in range(6)]

    def claim(document: RunDocument) -> RunDocument | None:
        try:
            return claim_run(store, document, SIGNER)
        except RunExistsError:
            return None

    with ThreadPoolExecutor(len(documents)) as pool:
        (winner,) = [found for found in pool.map(claim, documents) if found is not None]
    assert read_run(store, "demo", SIGNER.public_key) == winner


def test_run_that_is_not_there_is_missing(store: Store):
    with pytest.raises(RunMissingError, match="nothing"):
        read_run(store, "nothing")


def test_run_document_by_another_key_than_the_pinned_one_is_refused(store: Store):
    forger = Signer.generate()
    claim_run(store, new_run(RunConfig(run="demo"), forger, layout_id="l", model_files=()), forger)
    assert read_run(store, "demo").public_key == forger.public_key
    with pytest.raises(SignatureError, match="trusts"):
        read_run(store, "demo", SIGNER.public_key)


def test_run_document_that_was_edited_is_refused(store: Store):
    document = claim_run(store, new_run(RunConfig(run="demo"), SIGNER, layout_id="l", model_files=()), SIGNER)
    key = keys.run_json("demo")
    tree = json.loads(store.get(key, max_bytes=1 << 20).data)
    edits = [
        ({**tree, "layout_id": "other"}, SignatureError),
        ({**tree, "sig": ""}, SignatureError),
        ({**tree, "public_key": "AAAA"}, SignatureError),
    ]
    resigned = {**tree, "format": "stoa-run-9"}
    edits.append(({**resigned, "sig": SIGNER.sign(resigned)}, FormatError))
    stranger = {**tree, "surprise": 1}
    edits.append(({**stranger, "sig": SIGNER.sign(stranger)}, FormatError))
    for edited, error in edits:
        store.delete([key])
        store.create(key, canonical(edited))
        with pytest.raises(error):
            read_run(store, "demo")
    assert document.run == "demo"


def test_model_files_are_fetched_checked_and_kept(store: Store, folder, tmp_path):
    files = upload_model_files(store, "demo", folder)
    fetch_model_files(store, files, tmp_path / "copy")
    assert (tmp_path / "copy" / "config.json").read_text() == '{"model_type":"lfm2_moe"}'
    (tmp_path / "copy" / "config.json").write_text("damaged")
    requests = store.meters.total().requests_down
    fetch_model_files(store, files, tmp_path / "copy")
    assert (tmp_path / "copy" / "config.json").read_text() == '{"model_type":"lfm2_moe"}'
    assert store.meters.total().requests_down == requests + 1
    with pytest.raises(DigestError):
        fetch_model_files(store, (dataclasses.replace(files[0], sha256="0" * 64),), tmp_path / "other")
    with pytest.raises(FormatError):
        fetch_model_files(store, (dataclasses.replace(files[0], name="../escape"),), tmp_path / "other")
