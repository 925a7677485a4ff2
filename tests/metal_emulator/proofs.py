"""The proofs of all kernels by their numbers."""

from tests.metal_emulator.proof import Proof
from tests.metal_emulator.proof_attention import AttentionProof, PrefixProof
from tests.metal_emulator.proof_conv import ConvProof
from tests.metal_emulator.proof_experts import ExpertsProof
from tests.metal_emulator.proof_head import HeadProof
from tests.metal_emulator.proof_router import RouterProof

PROOFS: dict[str, Proof] = {
    "K1": ExpertsProof(),
    "K2": HeadProof(),
    "K3": AttentionProof(),
    "K4": RouterProof(),
    "K5": PrefixProof(),
    "K6": ConvProof(),
}
