// Body of the router kernel: one simdgroup of 32 lanes a token (grid 32 x N, threadgroup 32).
// Inputs: logits float [N, E]; bias float [E]; scale float [1]. Template: int E, int K, bool NORMALISE.
// Outputs: experts uint [N, K] by falling biased score, the lower index first among equals; weights float [N, K].
constexpr uint SLOTS = (E + 31) / 32;
const uint lane = thread_position_in_threadgroup.x;
const uint token = thread_position_in_grid.y;

// Lane l holds experts l, l + 32, l + 64, ...: score without bias, and what is left to choose from.
float score[SLOTS];
float left[SLOTS];
for (uint slot = 0; slot < SLOTS; ++slot) {
    const uint expert = slot * 32 + lane;
    score[slot] = 0.0f;
    left[slot] = -INFINITY;
    if (expert < uint(E)) {
        score[slot] = 1.0f / (1.0f + metal::precise::exp(-logits[token * E + expert]));
        left[slot] = score[slot] + bias[expert];
    }
}

float total = 0.0f;
float chosen_score[K];
uint chosen_expert[K];
for (uint round = 0; round < uint(K); ++round) {
    float best = left[0];
    uint best_slot = 0;
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
    }
}
