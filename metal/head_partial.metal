// K2, first half: for every row and block of 32 words, the highest logit and the sum of exp(logit - highest).
// Uses int8_tile.metal. Logits live in threadgroup memory only.
//
// Grid (128 * blocks, 1, 1), threadgroup 128: one threadgroup a block, for all rows in passes of at most 64.
// Inputs: x T [R, D]; codes uint [V, D / 4]; scales, biases bfloat [V, D / 64]; size int [2], R and V.
// Template: int D (a multiple of 64). blocks = ceil(V / 32); words past V count for nothing.
// Outputs: highest float [R, blocks]; sums float [R, blocks].
threadgroup float row_tile[64 * STOA_STRIDE];
threadgroup float word_tile[32 * STOA_STRIDE];
const uint index = thread_index_in_threadgroup, simdgroup = simdgroup_index_in_threadgroup, lane = thread_index_in_simdgroup;
const uint block = threadgroup_position_in_grid.x, num_blocks = threadgroups_per_grid.x;
const uint all_rows = uint(size[0]), num_words = uint(size[1]);

for (uint row = 0; row < all_rows; row += 64) {
    const uint num_rows = min(64u, all_rows - row), num_tiles = (num_rows + 7) / 8;
    simdgroup_matrix<float, 8, 8> logits[8];
    stoa_clear<8>(logits);
    for (uint k = 0; k < uint(D); k += STOA_STEP) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint i = index; i < num_tiles * 8 * STOA_STEP; i += STOA_THREADS) {
            const uint own = i / STOA_STEP, element = i % STOA_STEP;
            row_tile[own * STOA_STRIDE + element] = own < num_rows ? float(x[ulong(row + own) * D + k + element]) : 0.0f;
        }
        stoa_widen(codes, scales, biases, word_tile, block * STOA_COLUMNS, num_words, D, k, index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        stoa_multiply<8>(row_tile, word_tile, logits, num_tiles, simdgroup);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);  // all have read the tile that now takes the logits
    stoa_spill<8>(logits, row_tile, num_tiles, simdgroup);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint own = simdgroup; own < num_rows; own += 4) {
        const bool real = block * STOA_COLUMNS + lane < num_words;
        const float logit = real ? row_tile[own * STOA_STRIDE + lane] : -INFINITY;
        const float top = simd_max(logit);
        const float sum = simd_sum(exp(logit - top));
        if (lane == 0) {
            highest[ulong(row + own) * num_blocks + block] = top;
            sums[ulong(row + own) * num_blocks + block] = sum;
        }
    }
}
