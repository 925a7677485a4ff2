"""What a run is: one frozen tree of settings, resolved once and kept in the bucket's run.json.

Every number with a default lives here and was run with that default. Reading TOML and the environment is `load.py`'s.
"""

from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError


def _url(text: str) -> str:
    """`text` if it is the URL of a server."""
    try:
        parts = urlsplit(text)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and " " not in text
    except ValueError:
        fits = False
    if not fits:
        raise PydanticCustomError("url", "should be a URL like http://127.0.0.1:8333")
    return text


def _address(text: str) -> str:
    """`text` if it is host:port."""
    try:
        parts = urlsplit(f"//{text}")
        fits = bool(parts.hostname) and bool(parts.port) and parts.netloc == text and " " not in text
    except ValueError:
        fits = False
    if not fits:
        raise PydanticCustomError("address", "should be a host and a port like 127.0.0.1:7233")
    return text


def _groups(given: object) -> object:
    """`given` if it is "auto" or a number of groups."""
    if given == "auto" or (isinstance(given, int) and not isinstance(given, bool) and 1 <= given <= MOST_GROUPS):
        return given
    raise PydanticCustomError("groups", 'should be "auto" or a number from 1 to {most}', {"most": MOST_GROUPS})


MOST_GROUPS = 64
"""Groups that a Mac may be given at a time."""
Groups = Annotated[int | Literal["auto"], PlainValidator(_groups)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,47}$")]
BucketName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$")]
Namespace = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,254}$")]
Url = Annotated[str, AfterValidator(_url)]
Address = Annotated[str, AfterValidator(_address)]
MaybeUrl = Annotated[str, AfterValidator(lambda text: text and _url(text))]
MaybeAddress = Annotated[str, AfterValidator(lambda text: text and _address(text))]
Scalar = str | int | float | bool
DAY_SECONDS = 86_400.0
MAX_COUNT = 99_999_999
"""Largest version or step: their numbers have eight digits in keys."""
MAX_BETA2_BFLOAT16 = 0.99
"""Above 1 - 2 ** -8 a bf16 second moment can never fall; here it follows within a fifth of the gradient's scale."""


_Section = TypeVar("_Section", bound="Section")


class Section(BaseModel):
    """A frozen table of settings that refuses unknown keys."""

    # JSON, in which run.json is kept, has neither infinity nor NaN.
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


def not_above(section: _Section, lower: str, upper: str) -> _Section:
    """`section`, if its setting `lower` is not above its setting `upper`."""
    low, high = getattr(section, lower), getattr(section, upper)
    if low > high:
        raise PydanticCustomError(
            "order", "{lower} = {low} is above {upper} = {high}", {"lower": lower, "low": low, "upper": upper, "high": high}
        )
    return section


class Temporal(Section):
    """Where the control plane is."""

    address: Address = "127.0.0.1:7233"
    """Host and port of the Temporal frontend."""
    namespace_core: Namespace = "default"
    """Namespace of the run and the trainer."""
    namespace_mac: Namespace = "default"
    """Namespace of Mac sessions and evaluations; may be the same one."""
    tls: bool = False
    """Speak TLS to it. Certificates and keys come from the environment only."""
    tls_server_name: str = ""
    """Name that its certificate must have; "" for the host of the address."""


class Bucket(Section):
    """Where the bytes are. Keys and secrets come from the environment only."""

    endpoint: Url = "http://127.0.0.1:8333"
    """URL of the S3 endpoint."""
    name: BucketName = "stoa"
    """Name of the bucket."""
    region: Annotated[str, Field(min_length=1)] = "auto"
    """Region of the bucket; R2's is auto."""
    head_interval_seconds: Annotated[float, Field(ge=0.0, le=60.0)] = 1.0
    """Least time between two writes of HEAD: R2 allows one a second."""


class Macs(Section):
    """How invited Macs reach the servers, where that is another way than this host's; told in their tokens."""

    temporal_address: MaybeAddress = ""
    """Host and port of the proxy before Temporal; "" for temporal.address."""
    temporal_tls: bool = False
    """The proxy speaks TLS; with "" above temporal.tls counts."""
    bucket_endpoint: MaybeUrl = ""
    """URL of the bucket as Macs see it, for which their tickets are signed; "" for bucket.endpoint."""


class Environment(Section):
    """What the policy practises on."""

    name: str = "search"
    """Name in the registry of environments."""
    settings: dict[str, Scalar] = Field(default_factory=dict)
    """The environment's own settings."""


class Rollout(Section):
    """How a sweep is played."""

    groups: Groups = "auto"
    """Groups one Mac is given at a time; auto: as many as its memory holds and its speed pays for, at most 8 until that is measured."""
    group_size: Annotated[int, Field(ge=4, le=8)] = 8
    """Episodes of one question."""
    min_group_size: Annotated[int, Field(ge=4, le=8)] = 4
    """Fewest scored episodes a group may ship with."""
    record_routing: bool = False
    """Record the experts chosen for every token."""
    fingerprints: Annotated[list[str], Field(max_length=64)] = Field(default_factory=list)
    """Numeric fingerprints of engines whose groups are admitted, as `stoa doctor` tells them; none: all are."""
    canary_sweeps: Annotated[int, Field(ge=0, le=1000)] = 3
    """Clean sweeps after which a Mac that the trainer suspects is trusted again: it plays on unknowing, and nothing is trained on it;
    0: its owner is told, and it stops until it is released by hand."""

    @property
    def usual_groups(self) -> int:
        """Groups of a sweep where no Mac says how many it can play."""
        return 8 if self.groups == "auto" else self.groups

    @model_validator(mode="after")
    def _fits(self) -> Self:
        return not_above(self, "min_group_size", "group_size")


class Gate(Section):
    """The DPPO rule that drops a token."""

    mode: Literal["tv", "kl", "symmetric", "ppo_clip", "dual_clip_tv", "off"] = "tv"
    """Which rule is trained with; all are logged."""
    delta: Annotated[float, Field(gt=0.0, le=1.0)] = 0.2
    """How far a token's probability may move outward (tv)."""
    delta_kl: Annotated[float, Field(gt=0.0)] = 0.05
    """The same for the binary KL."""
    ratio_cap: Annotated[float, Field(ge=1.0)] = 20.0
    """Upper bound of pi / mu in the gradient."""


class Learning(Section):
    """How gradients become weights."""

    learning_rate: Annotated[float, Field(ge=0.0)] = 1e-4
    """Adam's learning rate."""
    warmup_steps: Annotated[int, Field(ge=0, le=MAX_COUNT)] = 0
    """Steps over which the learning rate rises from 0."""
    beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """Adam's beta 1."""
    beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    """Adam's beta 2."""
    epsilon: Annotated[float, Field(gt=0.0)] = 1e-8
    """Adam's epsilon."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    """AdamW's weight decay."""
    grad_clip: Annotated[float, Field(gt=0.0)] = 1.0
    """Largest norm of a step's gradient."""
    groups_per_step: Annotated[int, Field(ge=1, le=4096)] = 8
    """Usable groups an optimizer step trains on."""
    steps_per_version: Annotated[int, Field(ge=1, le=4096)] = 4
    """Optimizer steps between two published versions."""
    normalise_advantage: bool = False
    """Divide advantages by the group's standard deviation."""
    tokens_per_sequence: Annotated[int, Field(ge=1, le=1_048_576)] = 12
    """Planned sampled tokens of a sequence: the fixed denominator of the loss is sequences x this."""
    micro_batch_tokens: Annotated[int, Field(ge=64, le=16_777_216)] = 8192
    """Token budget of one forward and backward pass."""
    max_staleness: Annotated[int, Field(ge=0, le=1000)] = 3
    """Versions of lag that admission plans for."""
    max_staleness_hard: Annotated[int, Field(ge=0, le=1000)] = 8
    """Versions of lag beyond which a group is dropped."""
    max_refills: Annotated[float, Field(ge=1.0, le=1000.0)] = 4.0
    """Groups a step may look at, as a multiple of groups_per_step, before it counts as starved of signal."""
    starved_seconds: Annotated[float, Field(gt=0.0, le=DAY_SECONDS)] = 300.0
    """Longest wait of one step for groups."""
    intake_poll_seconds: Annotated[float, Field(gt=0.0, le=60.0)] = 0.3
    """How often the trainer looks for new groups while it waits."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the forward pass; masters are float32."""
    num_threads: Annotated[int, Field(ge=0, le=1024)] = 1
    """Threads of the trainer on a CPU host; 0 leaves it to torch."""
    expert_parallel: Annotated[int, Field(ge=0, le=4096)] = 0
    """Processes of the trainer that share one set of experts; 0: as many as divide both processes and experts."""
    moment_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of Adam's moments between steps: bfloat16 saves 4 bytes a parameter and needs a beta2 of at most 0.99."""
    optimizer_on_host: bool = False
    """Keep fp32 masters and Adam's moments in the host's memory, and update there: saves 12 bytes a parameter on the GPUs."""
    gate: Gate = Field(default_factory=Gate)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.moment_dtype == "bfloat16" and self.beta2 > MAX_BETA2_BFLOAT16:
            raise PydanticCustomError(
                "moments",
                "moment_dtype = bfloat16 with beta2 = {beta2}: a second moment that changes by less than {least} a step is rounded"
                " back and stays; at most {most} works",
                {"beta2": self.beta2, "least": "1/256", "most": MAX_BETA2_BFLOAT16},
            )
        return not_above(self, "max_staleness", "max_staleness_hard")


class Alarm(Section):
    """A bound on a metric; crossing it pauses the trainer or is only logged."""

    threshold: float
    """Value at which it fires."""
    action: Literal["pause", "log"] = "log"
    """What it does."""
    steps: Annotated[int, Field(ge=1, le=20)] = 1
    """Steps in a row that the metric must be beyond the bound."""
    warn: float | None = None
    """Value at which it is logged as near."""


class Alarms(Section):
    """Alarms on step metrics. The bounds lie between three healthy demo runs and runs that collapsed (docs/log.md)."""

    gate_drop_rate: Alarm = Alarm(threshold=0.25, warn=0.15, steps=3)
    """Share of tokens with an advantage that the gate drops."""
    mismatch_mean: Alarm = Alarm(threshold=0.2, warn=0.1)
    """Mean |pi - mu| over sampled tokens."""
    mismatch_ratio: Alarm = Alarm(threshold=8.0, warn=4.0)
    """The same over its mean of the run's first 20 steps."""
    mismatch_climb: Alarm = Alarm(threshold=0.12, warn=0.05, action="pause")
    """Mean |pi - mu|, while it has risen five steps in a row."""
    bad_fraction: Alarm = Alarm(threshold=0.15, warn=0.05, steps=2, action="pause")
    """Share of tokens with a negative advantage whose probability fell by more than 0.5."""
    ess_fraction: Alarm = Alarm(threshold=0.2, warn=0.5, action="pause")
    """Effective sample size over tokens; fires below."""
    ess_fall: Alarm = Alarm(threshold=0.6, warn=0.3)
    """Share of the effective sample size lost over five steps."""
    grad_norm_ratio: Alarm = Alarm(threshold=20.0, warn=5.0, action="pause")
    """Gradient norm over its running median; one that is not finite fails the step."""
    logprob_positive_fall: Alarm = Alarm(threshold=0.2, steps=5)
    """How far the mean ln pi of tokens with a positive advantage sinks below its running mean, as a share."""
    entropy_shift: Alarm = Alarm(threshold=5.0, warn=4.0)
    """Doublings or halvings of the entropy since the run's first 20 steps."""
    cover_gap_rise: Alarm = Alarm(threshold=0.2, warn=0.1, steps=10)
    """Growth of the share of answers that contain a gold answer without being one."""
    truncated_rate: Alarm = Alarm(threshold=0.2, warn=0.05)
    """Share of episodes that a token limit ended."""
    malformed_rate: Alarm = Alarm(threshold=0.5, warn=0.2)
    """Share of episodes that a malformed turn ended."""
    unanswered_rate: Alarm = Alarm(threshold=0.5, warn=0.3)
    """Share of episodes that ended without an answer, whatever ended them."""
    refused_wrong_state: Alarm = Alarm(threshold=0.0)
    """Groups refused since the step before because no version has the weights that they were played on."""
    zero_variance_fraction: Alarm = Alarm(threshold=0.9, warn=0.6)
    """Share of groups whose rewards are all equal."""
    answer_words_ratio: Alarm = Alarm(threshold=3.0, warn=2.0, steps=10)
    """Words of an answer over those of the run's first 20 steps."""
    hacking: Alarm = Alarm(threshold=0.1, warn=0.05, action="pause")
    """How far the looser mark rose while the stricter one fell, over ten steps."""
    staleness_beyond_fraction: Alarm = Alarm(threshold=0.5, warn=0.05)
    """Share of groups older than the versions of lag that admission plans for."""
    infra_fault_rate: Alarm = Alarm(threshold=0.2, warn=0.05, action="pause")
    """Share of episodes that are missing from the step's groups: lost to faults that are not the policy's."""
    quarantined_share: Alarm = Alarm(threshold=0.34, warn=0.1, action="pause")
    """Share of the run's Macs that are quarantined."""
    changed_ratio: Alarm = Alarm(threshold=5.0, warn=3.0)
    """Share of codes that a version changes over the usual one."""
    changed_nothing: Alarm = Alarm(threshold=0.5)
    """1 when steps were taken and a version changes no code."""
    eval_fall: Alarm = Alarm(threshold=0.0)
    """How far the upper end of a held-out result's 95 % interval lies below the run's first result."""
    eval_fall_twice: Alarm = Alarm(threshold=0.0, action="pause")
    """The smaller one of the last two: worse than at the start twice in a row."""


class Publish(Section):
    """How weights leave the trainer."""

    hysteresis: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.02
    """Dead band, in code steps, around half a step before a code moves."""
    anchor_every_versions: Annotated[int, Field(ge=1, le=MAX_COUNT)] = 20
    """Full weights every this many versions; with anchor_by_join_cost at least so often."""
    anchor_by_join_cost: bool = False
    """Full weights as soon as joining Macs would fetch more beyond the last ones than new ones cost to send."""
    checkpoint_every_versions: Annotated[int, Field(ge=1, le=MAX_COUNT)] = 1
    """Trainer state every this many versions."""
    keep_checkpoints: Annotated[int, Field(ge=2, le=1000)] = 2
    """Checkpoints kept in the bucket."""
    anchor_part_bytes: Annotated[int, Field(ge=65536, le=5_368_709_120)] = 134_217_728
    """Size at which an anchor starts another part."""


class Retention(Section):
    """What `stoa weights gc` leaves in the bucket beyond what the run needs at this moment."""

    grace_hours: Annotated[float, Field(ge=0.0, le=8760.0)] = 24.0
    """How long an object must have been announced as unneeded before it goes: longer than the slowest join."""
    anchors: Annotated[int, Field(ge=1, le=1000)] = 2
    """Newest anchors kept, with all that leads on from them."""
    group_versions: Annotated[int, Field(ge=0, le=MAX_COUNT)] = 8
    """Versions beyond the staleness window of which settled groups are kept, for people who look."""


class Prices(Section):
    """What the bucket charges; the defaults are Cloudflare R2's. A GPU's price is stop.dollars_per_gpu_hour."""

    writes_usd_a_million: Annotated[float, Field(ge=0.0, le=1e6)] = 4.5
    """Dollars for a million writes and listings."""
    reads_usd_a_million: Annotated[float, Field(ge=0.0, le=1e6)] = 0.36
    """Dollars for a million reads."""
    egress_usd_a_gb: Annotated[float, Field(ge=0.0, le=1e3)] = 0.0
    """Dollars for a gigabyte that Macs pull."""


class Evaluation(Section):
    """Held-out examination."""

    every_versions: Annotated[int, Field(ge=0, le=MAX_COUNT)] = 4
    """Versions between two evaluations; 0 for only first and last."""
    num_questions: Annotated[int, Field(ge=1, le=1_000_000)] = 128
    """Questions of an evaluation on the way."""
    num_questions_final: Annotated[int, Field(ge=1, le=1_000_000)] = 512
    """Questions of the first and the last evaluation."""
    num_samples_final: Annotated[int, Field(ge=1, le=16)] = 1
    """Samples of each question there; with several, pass@k is told beside pass@1."""
    questions_a_part: Annotated[int, Field(ge=1, le=256)] = 64
    """Questions handed to one Mac at a time."""
    temperature: Annotated[float, Field(ge=0.0, le=10.0)] = 1.0
    """Logits are divided by this; 0 takes the likeliest token. Training always samples at 1, without filters."""
    top_k: Annotated[int, Field(ge=0, le=MAX_COUNT)] = 0
    """Sample from so many likeliest tokens; 0 for all."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Sample from the fewest likeliest tokens that have this probability together."""
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Sample from tokens at least so many times as likely as the likeliest."""


class Stop(Section):
    """When the run ends by itself; 0 turns a condition off."""

    max_steps: Annotated[int, Field(ge=0, le=MAX_COUNT)] = 96
    """Optimizer steps."""
    max_versions: Annotated[int, Field(ge=0, le=MAX_COUNT)] = 0
    """Published versions."""
    max_minutes: Annotated[float, Field(ge=0.0, le=5_256_000.0)] = 0.0
    """Wall clock."""
    target_pass_at_1: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Held-out pass@1 that is enough: the lower end of a result's 95 % interval must reach it."""
    max_gpu_hours: Annotated[float, Field(ge=0.0, le=1e9)] = 0.0
    """GPUs times hours for which trainers have held the run, also before it was resumed."""
    max_dollars: Annotated[float, Field(ge=0.0, le=1e12)] = 0.0
    """What those hours cost; needs dollars_per_gpu_hour."""
    dollars_per_gpu_hour: Annotated[float, Field(ge=0.0, le=1e6)] = 0.0
    """Price of one GPU for one hour; alone it only counts."""
    on_alarm: bool = False
    """End the run at an alarm that would pause it."""

    @model_validator(mode="after")
    def _has_a_price(self) -> Self:
        if self.max_dollars and not self.dollars_per_gpu_hour:
            raise PydanticCustomError("price", "max_dollars needs dollars_per_gpu_hour: without a price nothing is spent")
        return self


class Timeouts(Section):
    """Limits of waiting."""

    heartbeat_seconds: Annotated[float, Field(ge=2.0, le=3600.0)] = 30.0
    """Longest silence of a running activity."""
    sweep_seconds: Annotated[float, Field(ge=10.0, le=DAY_SECONDS)] = 900.0
    """Longest sweep."""
    step_seconds: Annotated[float, Field(ge=10.0, le=7 * DAY_SECONDS)] = 3600.0
    """Longest optimizer step."""
    away_minutes: Annotated[float, Field(gt=0.0, le=525_600.0)] = 30.0
    """How long a lost Mac's session waits for it."""
    head_poll_seconds: Annotated[float, Field(gt=0.0, le=3600.0)] = 10.0
    """How often a Mac that has nothing to do looks at HEAD."""


class RunConfig(Section):
    """All settings of one run."""

    run: Name = "demo"
    """Name of the run: lower case letters, digits and dashes."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of question order and sampling."""
    model: str = "environments/search/policy"
    """Folder of the base checkpoint."""
    temporal: Temporal = Field(default_factory=Temporal)
    bucket: Bucket = Field(default_factory=Bucket)
    macs: Macs = Field(default_factory=Macs)
    environment: Environment = Field(default_factory=Environment)
    rollout: Rollout = Field(default_factory=Rollout)
    learning: Learning = Field(default_factory=Learning)
    alarms: Alarms = Field(default_factory=Alarms)
    publish: Publish = Field(default_factory=Publish)
    retention: Retention = Field(default_factory=Retention)
    evaluation: Evaluation = Field(default_factory=Evaluation)
    prices: Prices = Field(default_factory=Prices)
    stop: Stop = Field(default_factory=Stop)
    timeouts: Timeouts = Field(default_factory=Timeouts)

    @property
    def groups_per_version(self) -> int:
        """B of the admission rule: usable groups a version consumes."""
        return self.learning.steps_per_version * self.learning.groups_per_step

    @property
    def model_folder(self) -> Path:
        """Folder of the base checkpoint as given."""
        return Path(self.model)
