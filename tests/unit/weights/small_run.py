"""A small run for tests of the weights' way: an lfm2_moe of a few tensors, random masters, a publisher and HEAD."""

import json
from pathlib import Path

import numpy as np

from stoa.bucket.head import Head, HeadWriter
from stoa.bucket.manifest import Signer
from stoa.bucket.run_document import RunDocument, claim_run, new_run, upload_model_files
from stoa.bucket.store import Store
from stoa.config.run import Learning, RunConfig
from stoa.weights.layout import Layout, layout_of
from stoa.weights.sync import Prepared, Publisher

MODEL_CONFIG = {
    "model_type": "lfm2_moe",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_dense_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "use_expert_bias": True,
    "norm_topk_prob": True,
    "conv_L_cache": 3,
    "conv_bias": False,
    "norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "layer_types": ["conv", "full_attention"],
}


def masters(layout: Layout, seed: int = 0) -> dict[str, np.ndarray]:
    """Normal weights of width 0.02, as a freshly made model has them."""
    chance = np.random.default_rng(seed)
    return {spec.name: chance.normal(0, 0.02, spec.shape).astype(np.float32) for spec in layout.tensors}


def drift(weights: dict[str, np.ndarray], seed: int, size: float = 2e-5) -> dict[str, np.ndarray]:
    """Masters after a few more steps; expert_bias stays."""
    chance = np.random.default_rng(seed)
    return {
        name: value if name.endswith("expert_bias") else (value + chance.normal(0, size, value.shape)).astype(np.float32)
        for name, value in weights.items()
    }


class SmallRun:
    """A run in a bucket with everything needed to publish."""

    def __init__(
        self, store: Store, folder: Path, *, name: str = "small", dtype: str = "float32", hysteresis: float = 0.02, **model: object
    ) -> None:
        """`model`: other settings of its config."""
        model_config = {**MODEL_CONFIG, **model}
        self.store = store
        self.signer = Signer.from_seed(bytes(range(32)))
        self.layout = layout_of(model_config, dtype)
        self.model_files = folder / "model"
        self.model_files.mkdir(parents=True, exist_ok=True)
        (self.model_files / "config.json").write_text(json.dumps(model_config))
        files = upload_model_files(store, name, self.model_files)
        config = RunConfig(run=name, learning=Learning(dtype=dtype))
        self.document: RunDocument = claim_run(
            store, new_run(config, self.signer, layout_id=self.layout.layout_id, model_files=files), self.signer
        )
        self.hysteresis = hysteresis
        self.publisher = self.new_publisher()
        self.writer = HeadWriter(store, name, self.signer, owner="trainer", interval_seconds=0.0)
        self.head: Head = self.writer.acquire(1000)
        self.weights = masters(self.layout)
        self.epoch = 1000

    def new_publisher(self) -> Publisher:
        return Publisher(self.store, self.document, self.signer, hysteresis=self.hysteresis, anchor_part_bytes=50_000)

    def publish(self, *, anchor: bool = False, inline: bool = True) -> Prepared:
        """Publish the present weights as the next version and swap HEAD. `inline`: its anchor and roll-ups are announced at once."""
        version = self.head.version + 1
        prepared = self.publisher.prepare(
            self.weights.items(), step=4 * version, epoch=self.epoch, version=version, anchor=anchor, inline=inline
        )
        self.head = self.writer.swap(
            self.epoch, version=version, manifest_key=prepared.manifest_key, manifest_sha256=prepared.manifest_sha256, published_at=1.0
        )
        self.publisher.commit(prepared)
        return prepared

    def publish_many(self, count: int, *, anchor_every: int) -> None:
        """Publish `count` versions that drift."""
        for _ in range(count):
            version = self.head.version + 1
            if version:
                self.weights = drift(self.weights, version)
            self.publish(anchor=version % anchor_every == 0)
