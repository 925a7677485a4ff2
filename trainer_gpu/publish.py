"""From fp32 masters to a published version: the scan, for which the trainer waits, then seal, swap and commit, beside it.

What goes into the bucket is `stoa.weights.publisher`'s and HEAD's protocol is `stoa.bucket.head`'s. `scan` is the torch
twin of `stoa.weights.grid.scan` and gives the same bits.

Legend: N groups, 64 the elements of a group, R re-gridded groups, C changed codes.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
import torch
from numpy.typing import NDArray

from stoa.bucket.head import Head
from stoa.contracts.errors import NonFiniteError, ServiceUnavailableError
from stoa.weights import grid
from stoa.weights.layout import GROUP_SIZE
from stoa.weights.publisher import Prepared, Publisher
from trainer_gpu import host
from trainer_gpu.policy import Policy
from trainer_gpu.run_handle import RunHandle

_WAIT_SECONDS = 0.5
BLOCK_GROUPS = 1 << 18 if host.HAS_CUDA else 1 << 12
"""Groups on the accelerator at a time; on a processor, as many as its cache holds."""


class VersionPublisher:
    """Publishes one lease's versions, each while the trainer goes on after the scan. One thread at a time."""

    def __init__(self, handle: RunHandle) -> None:
        publish = handle.config.publish
        self._publisher = Publisher(
            handle.store,
            handle.document,
            handle.signer,
            hysteresis=publish.hysteresis,
            anchor_part_bytes=publish.anchor_part_bytes,
            folder=None if handle.folder is None else handle.folder / "runs" / handle.run / "weights",
        )
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="publish")
        self._flight: Future[Prepared] | None = None
        self._swap: Callable[[Prepared], None] = lambda prepared: None

    @property
    def anchor_version(self) -> int:
        """Version of the newest announced anchor; -1 before the first."""
        return self._publisher.anchor_version

    @property
    def weights_bytes(self) -> int:
        """Bytes of full weights."""
        return self._publisher.layout.num_bytes

    def load_published(self, head: Head) -> None:
        """Bring the mirror to what HEAD names."""
        self._publisher.load_published(head)

    def is_published(self, policy: Policy, *, step: int, token: int, version: int) -> bool:
        """True if the masters, at `step`, are what HEAD's `version` has, to the bit: another version would change nothing."""
        self._scan(policy, step=step, token=token, version=version + 1, anchor=False, inline=False)
        try:
            return self._publisher.changes_nothing
        finally:
            self._publisher.rollback()

    def _scan(self, policy: Policy, *, step: int, token: int, version: int, anchor: bool, inline: bool) -> float:
        quantise = scan if host.HAS_CUDA else grid.scan
        return self._publisher.scan(
            host_tensors(policy), step=step, epoch=token, version=version, anchor=anchor, inline=inline, quantise=quantise
        )

    def publish(
        self, policy: Policy, *, step: int, token: int, version: int, anchor: bool, inline: bool, swap: Callable[[Prepared], None]
    ) -> float:
        """Scan the masters, which may move on when this returns; returns the changed fraction.

        On another thread the version's objects are written, `swap` makes HEAD name them, and the mirror advances. `finish`
        must have been called for the version before. Arguments as `Publisher.scan`.
        """
        changed_fraction = self._scan(policy, step=step, token=token, version=version, anchor=anchor, inline=inline)
        self._swap = swap
        self._flight = self._pool.submit(self._complete)
        return changed_fraction

    def finish(self, on_wait: Callable[[], None]) -> Prepared | None:
        """Wait until HEAD names the version in flight, calling `on_wait` now and then; None if there is none.

        Raises what stopped it. If that may pass, the version is in flight again, for the next call here.
        """
        flight = self._flight
        if flight is None:
            return None
        while not wait([flight], _WAIT_SECONDS).done:
            on_wait()
        self._flight = None
        try:
            return flight.result()
        except ServiceUnavailableError:
            self._flight = self._pool.submit(self._complete)
            raise
        except BaseException:
            self._publisher.rollback()
            raise

    def failed(self) -> bool:
        """True if the version in flight has come to nothing, which `finish` raises."""
        return self._flight is not None and self._flight.done() and self._flight.exception() is not None

    def close(self, patience_seconds: float) -> None:
        """Let the version in flight arrive, if it does in time; end what is uploaded beside."""
        if self._flight is not None:
            wait([self._flight], patience_seconds)
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._publisher.close()

    def _complete(self) -> Prepared:
        prepared = self._publisher.seal()
        try:
            self._swap(prepared)
        except BaseException:
            self._publisher.unseal()
            raise
        self._publisher.commit(prepared)
        return prepared


def host_tensors(policy: Policy) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """The masters under their names on the wire, fp32 in host memory, one at a time."""
    for name, tensor in policy.wire_tensors():
        yield name, tensor.detach().to("cpu", torch.float32).contiguous().numpy()


def scan(
    weights: NDArray[np.float32],
    codes: NDArray[np.uint8],
    scales: NDArray[np.uint16],
    biases: NDArray[np.uint16],
    hysteresis: float,
    *,
    block_groups: int = BLOCK_GROUPS,
) -> grid.Scan:
    """`grid.scan` on the accelerator, `block_groups` groups at a time; same arguments, errors and bits."""
    device = host.device()
    weights_N64 = torch.from_numpy(weights.reshape(-1, GROUP_SIZE))
    codes_N64 = torch.from_numpy(codes.reshape(-1, GROUP_SIZE))
    scales_N, biases_N = (torch.from_numpy(bits.reshape(-1).view(np.int16)).view(torch.bfloat16) for bits in (scales, biases))
    parts: list[grid.Scan] = []
    for first in range(0, len(weights_N64), block_groups):
        rows = slice(first, first + block_groups)
        block = [tensor[rows].to(device) for tensor in (weights_N64, codes_N64, scales_N, biases_N)]
        parts.append(_scan_block(block[0], block[1], block[2], block[3], hysteresis, first))
    return grid.Scan(
        np.concatenate([part.positions for part in parts]),
        np.concatenate([part.codes for part in parts]),
        np.concatenate([part.groups for part in parts]),
        np.concatenate([part.scales for part in parts]),
        np.concatenate([part.biases for part in parts]),
        np.concatenate([part.group_codes for part in parts]),
        sum(part.num_clipped for part in parts),
        max(part.lag_steps for part in parts),
    )


def _scan_block(
    weights_N64: torch.Tensor,
    old_N64: torch.Tensor,
    scales_N: torch.Tensor,
    biases_N: torch.Tensor,
    hysteresis: float,
    first_group: int,
) -> grid.Scan:
    """`scan` of some whole groups on one device; `first_group` is the number of the first one in its tensor."""
    places_N64 = place(weights_N64, scales_N, biases_N)
    low, high = (float(edge) for edge in torch.aminmax(places_N64))
    if low >= -0.5 and high <= 255.5:  # so not for NaN
        return _quick_block(places_N64, old_N64, hysteresis, first_group)
    if not bool(torch.isfinite(weights_N64).all()):
        raise NonFiniteError("a weight is NaN or infinite")
    nearest_N64 = codes_of(places_N64)
    moved_N64 = nearest_N64 != old_N64
    if hysteresis > 0:
        moved_N64 &= (places_N64 - old_N64).abs_() > _threshold(hysteresis, places_N64)
    outside_N = (places_N64.amin(1) < -1) | (places_N64.amax(1) > 256)
    regrid_R = outside_N.nonzero().squeeze(1)
    new_scales_R, new_biases_R = make_grid(weights_N64[regrid_R])
    differs_R = (new_scales_R != scales_N[regrid_R]) | (new_biases_R != biases_N[regrid_R])
    regrid_R, new_scales_R, new_biases_R = regrid_R[differs_R], new_scales_R[differs_R], new_biases_R[differs_R]
    places_N64[regrid_R] = place(weights_N64[regrid_R], new_scales_R, new_biases_R)
    nearest_N64[regrid_R] = codes_of(places_N64[regrid_R])
    moved_N64[regrid_R] = False
    final_N64 = torch.where(moved_N64, nearest_N64, old_N64)
    final_N64[regrid_R] = nearest_N64[regrid_R]
    clipped_N64 = (places_N64 < -0.5) | (places_N64 > 255.5)
    lag_N64 = (places_N64 - final_N64).abs_().masked_fill_(clipped_N64, 0.0)
    positions_C = moved_N64.flatten().nonzero().squeeze(1)
    return grid.Scan(
        positions_C.cpu().numpy() + first_group * GROUP_SIZE,
        nearest_N64.flatten()[positions_C].cpu().numpy(),
        regrid_R.cpu().numpy() + first_group,
        bits(new_scales_R),
        bits(new_biases_R),
        nearest_N64[regrid_R].cpu().numpy(),
        int(clipped_N64.sum()),
        float(lag_N64.max()),
    )


def _quick_block(places_N64: torch.Tensor, old_N64: torch.Tensor, hysteresis: float, first_group: int) -> grid.Scan:
    """`_scan_block` where nothing is clipped or re-gridded: only a code half a step from its master or more can move."""
    distance_N64 = (places_N64 - old_N64).abs_()
    far_N64 = distance_N64 > _threshold(hysteresis, places_N64) if hysteresis > 0 else distance_N64 >= 0.5
    far_F = far_N64.flatten().nonzero().squeeze(1)
    places_F = places_N64.flatten()[far_F]
    nearest_F = codes_of(places_F)
    moved_F = nearest_F != old_N64.flatten()[far_F]
    positions_C, nearest_C = far_F[moved_F], nearest_F[moved_F]
    distance_N64.view(-1)[positions_C] = (places_F[moved_F] - nearest_C).abs()
    none = np.empty(0, dtype=np.uint16)
    return grid.Scan(
        positions_C.cpu().numpy() + first_group * GROUP_SIZE,
        nearest_C.cpu().numpy(),
        np.empty(0, dtype=np.int64),
        none,
        none,
        np.empty((0, GROUP_SIZE), dtype=np.uint8),
        0,
        float(distance_N64.max()),
    )


def _threshold(hysteresis: float, like: torch.Tensor) -> torch.Tensor:
    """float32(0.5 + d), as the reference has it."""
    return torch.tensor(0.5 + hysteresis, dtype=torch.float32, device=like.device)


def make_grid(weights_R64: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and biases, bf16 [R], as `grid.make_grid`. Raises NonFiniteError where a group is too wide."""
    if not len(weights_R64):
        empty = torch.empty(0, dtype=torch.bfloat16, device=weights_R64.device)
        return empty, empty
    low_R, high_R = weights_R64.amin(1), weights_R64.amax(1)
    # A tensor divisor: dividing by a Python number multiplies by its reciprocal on CUDA, which rounds otherwise.
    steps = torch.full_like(low_R, float(grid.STEPS))
    scales_R = ((high_R - low_R) / steps).bfloat16()
    constant_R = scales_R.float() < 2.0**-126
    scales_R = torch.where(constant_R, torch.ones_like(scales_R), scales_R)
    biases_R = torch.where(constant_R, low_R, low_R - grid.HEADROOM * scales_R.float()).bfloat16()
    if not bool((torch.isfinite(scales_R) & torch.isfinite(biases_R)).all()):
        raise NonFiniteError("a group of weights is NaN, infinite or too wide for the grid")
    return scales_R, biases_R


def place(weights_N64: torch.Tensor, scales_N: torch.Tensor, biases_N: torch.Tensor) -> torch.Tensor:
    """Where weights [N, 64] lie on their grid (bf16 [N]), in code steps, fp32; as `grid.place`."""
    return (weights_N64 - biases_N.float().unsqueeze(1)).div_(scales_N.float().unsqueeze(1))


def codes_of(places_N64: torch.Tensor) -> torch.Tensor:
    """Nearest codes, ties to even, uint8; as `grid.codes_of`."""
    return places_N64.round().clamp_(0, 255).to(torch.uint8)


def bits(values_R: torch.Tensor) -> NDArray[np.uint16]:
    """The bit patterns of a bf16 tensor."""
    return values_R.view(torch.int16).cpu().numpy().view(np.uint16)
