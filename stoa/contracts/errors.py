"""Every error the project raises on purpose, in one tree.

Each class says whether trying again can help (`retryable`) and each instance may carry a hint: what to do next.
Mapping to Temporal's failures happens in `activities/edge.py`, to exit codes in `cli/say.py`; nowhere else.
"""

from typing import ClassVar


class StoaError(Exception):
    """Base of all errors of the project. The message says what and where; `hint` says what next."""

    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(StoaError):
    """The person asked for something that cannot be: a wrong argument, a wrong order of commands."""


class ConfigError(UsageError):
    """A setting is unknown, out of range, or contradicts another."""


class BrokenEnvironmentError(ConfigError):
    """The Python code of an environment, or the list that names it, cannot be loaded or run."""


class ModelMissingError(UsageError):
    """A base checkpoint is not on this host and cannot be fetched."""


class UnknownNameError(UsageError):
    """A name (environment, question, codec, command) that nothing answers to."""


class MissingExtraError(UsageError):
    """A part of the project was started without the extra that installs what it needs."""


class RunExistsError(UsageError):
    """A run of this name is in the bucket already."""


class RunMissingError(UsageError):
    """No run of this name is in the bucket."""


class RunMismatchError(UsageError):
    """A resumed run differs from what was started."""


class InviteError(UsageError):
    """A join token is garbled, of another kind, or not for this."""


class InviteExpiredError(InviteError):
    """A join token is past its time."""


class InviteRevokedError(InviteError):
    """A join token, or its host, was revoked."""


class BuildTooOldError(UsageError):
    """This installation is older than the run accepts."""


class NamesakeError(UsageError):
    """Macs of two runs have one name in Temporal, which is of run and host together; the one that came second may not take part.

    A task that met the wrong one is tried again: it may reach the other.
    """

    retryable: ClassVar[bool] = True


class ServiceError(StoaError):
    """A server (Temporal, the bucket) cannot be used."""


class ServiceUnavailableError(ServiceError):
    """A server does not answer, or answers that it is not ready."""

    retryable: ClassVar[bool] = True


class AccessDeniedError(ServiceError):
    """A server refused our credentials."""


class SetupMissingError(ServiceError):
    """A server lacks what `stoa setup` makes: a namespace, a search attribute, a bucket."""


class PortTakenError(ServiceError):
    """A local server cannot have its port."""


class DiskFullError(StoaError):
    """There is no room for a file. What is on disk stays; with room made, the same call goes on where it ended."""

    retryable: ClassVar[bool] = True


class BucketError(StoaError):
    """The bucket holds something other than what was asked for."""


class ObjectMissingError(BucketError):
    """No object under this key."""


class ObjectExistsError(BucketError):
    """A create-only object is there already, with other bytes."""


class TicketError(BucketError):
    """No valid ticket for an object: none was given, it has expired, or the bucket does not take it. Another may come."""


class PreconditionError(BucketError):
    """A conditional write lost: the object changed since it was read."""


class ObjectTooLargeError(BucketError):
    """An object is larger than its kind may be."""


class DigestError(BucketError):
    """Bytes do not have the sha256 that was promised for them."""


class SignatureError(BucketError):
    """A signed document is unsigned, or signed by another key."""


class ReplayedError(BucketError):
    """The bucket answers with an older HEAD than one this machine has seen: somebody put it back."""


class FormatError(BucketError):
    """Bytes are not what their kind says: torn, of another version, or nonsense."""


class FencedError(StoaError):
    """Another trainer holds the run: this one must stop writing."""


class LostStateError(StoaError):
    """The trainer's memory is not at the step the workflow asks for; it must acquire the run again."""


class RankLostError(StoaError):
    """One of the processes that work as one is gone or out of step: all must end and start again."""


class WiredError(StoaError):
    """A wired set of Macs cannot work as one: a host, an address, a port, a split of the model, or unlike programs."""


class LinkMismatchError(StoaError):
    """Two Macs of a wired set would exchange arrays of other shapes or types than each expects; nothing was exchanged."""


class WeightsError(StoaError):
    """Weights cannot be used."""


class NonFiniteError(WeightsError):
    """A weight, gradient, logprob or reward is NaN or infinite."""


class FaultyGroupsError(NonFiniteError):
    """Single groups of a step make it NaN or infinite. `places` are theirs among the step's groups."""

    def __init__(self, message: str, places: tuple[int, ...]) -> None:
        super().__init__(message)
        self.places = places


class WrongBaseError(WeightsError):
    """A delta was made from other weights than the ones here."""


class WrongStateError(WeightsError):
    """Weights after an update do not have the promised state_id."""


class LayoutError(WeightsError):
    """Tensors do not have the names, shapes or types of the run's layout, or a parallel layout trains wrongly."""


class KernelArgumentsError(StoaError):
    """A Metal kernel was given arrays of other shapes or types than it is made for."""


class CheckpointError(StoaError):
    """A checkpoint cannot be loaded: torn, of another architecture, or of another run."""


class GroupRefusedError(StoaError):
    """A group of episodes is not admitted. `reason` is one of the short names in `stoa.rollouts.admit`."""

    def __init__(self, reason: str, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.reason = reason


class InfrastructureFaultError(StoaError):
    """An episode was lost to a fault outside the policy; it is no sample and may be played again."""

    retryable: ClassVar[bool] = True


class GpuInterruptedError(StoaError):
    """The system ended a computation on the GPU; what it wrote is not to be used. A smaller one may go through."""

    retryable: ClassVar[bool] = True


class GpuMemoryError(StoaError):
    """The trainer's GPU has too little memory for the model, its optimizer or a micro-batch."""


class StarvedError(StoaError):
    """A wait for work or data reached its limit."""

    retryable: ClassVar[bool] = True


class WorkerLockedError(UsageError):
    """Another worker uses this state folder."""


class MacCrashedError(StoaError):
    """The whole Mac crashed more than once lately while groups were played: nothing is played until a person says so."""


class MessageTooLargeError(StoaError):
    """A message that would cross Temporal is larger than allowed."""
