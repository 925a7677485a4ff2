// K4, first half: hidden states to experts and their weights, one threadgroup of 8 simdgroups a token.
//
// Grid (256, N, 1), threadgroup 256. Logits in float: simdgroup s sums those of experts s, s + 8, .. over the width, each
// lane every 32nd element. Then the first simdgroup chooses K times the highest sigmoid(logit) + bias, the lower index
// first among equals; weights come from the scores without bias.
// Inputs: x T [N, D]; gate T [E, D]; bias float [E]; scale float [1].
// Template: int D, int E (at most 256), int K, bool NORMALISE.
// Outputs: experts uint [N, K] by falling biased score; weights float [N, K]; record uint8 [N, K], the experts again.
constexpr uint SLOTS = (E + 31) / 32;
threadgroup float logits[E];
const uint token = threadgroup_position_in_grid.y, lane = thread_index_in_simdgroup;

for (uint expert = simdgroup_index_in_threadgroup; expert < uint(E); expert += 8) {
    float part = 0.0f;
    for (uint k = lane; k < uint(D); k += 32) {
        part += float(x[ulong(token) * D + k]) * float(gate[expert * D + k]);
    }
    const float logit = simd_sum(part);
    if (lane == 0) {
        logits[expert] = logit;
    }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
if (simdgroup_index_in_threadgroup > 0) {
    return;
}

// Lane l holds experts l, l + 32, l + 64, ...: score without bias, and what is left to choose from.
float score[SLOTS];
float left[SLOTS];
#pragma clang loop unroll(full)
for (uint slot = 0; slot < SLOTS; ++slot) {
    const uint expert = slot * 32 + lane;
    score[slot] = 0.0f;
    left[slot] = -INFINITY;
    if (expert < uint(E)) {
        score[slot] = 1.0f / (1.0f + exp(-logits[expert]));
        const float biased = score[slot] + bias[expert];
        left[slot] = isnan(biased) ? INFINITY : biased;  // as plain ops, which take what is no number first; never none
    }
}

float total = 0.0f;
float chosen_score[K];
uint chosen_expert[K];
#pragma clang loop unroll(full)
for (uint round = 0; round < uint(K); ++round) {
    float best = left[0];
    uint best_slot = 0;
    #pragma clang loop unroll(full)
    for (uint slot = 1; slot < SLOTS; ++slot) {
        if (left[slot] > best) {
            best = left[slot];
            best_slot = slot;
        }
    }
    const float top = simd_max(best);
    // Among lanes that reach the top the lowest expert wins; a lane's own slots were scanned from the lowest up.
    const uint mine = best == top ? best_slot * 32 + lane : 0xffffffffu;
    const uint winner = simd_min(mine);
    const float won = simd_sum(mine == winner ? score[best_slot] : 0.0f);
    if (mine == winner) {
        left[best_slot] = -INFINITY;
    }
    chosen_expert[round] = winner;
    chosen_score[round] = won;
    total += won;
}

if (lane == 0) {
    const float norm = NORMALISE ? 1.0f / (total + 1e-6f) : 1.0f;
    for (uint round = 0; round < uint(K); ++round) {
        experts[token * K + round] = chosen_expert[round];
        weights[token * K + round] = chosen_score[round] * norm * scale[0];
        record[token * K + round] = static_cast<uint8_t>(chosen_expert[round]);
    }
}
