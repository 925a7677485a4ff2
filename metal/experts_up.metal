// K1, first half: inner = silu(x . gate^T) * (x . up^T) of each row's expert. Uses int8_tile.metal.
//
// Grid (128 * columns / 32, experts, 1), threadgroup 128: one threadgroup makes 32 columns of one expert for all its rows,
// in passes of at most 32 rows, each 1 to 4 tiles of 8; weights are read once a pass.
// Inputs: x T [N, D]; order int [N * K], places token * K + choice sorted by expert; offsets int [E + 1], where each
//   expert's places begin in it; gate_codes, up_codes uint [E, I, D / 4]; gate_scales .. up_biases bfloat [E, I, D / 64].
// Template: typename T, int D, int I, int TOP_K. D and I are multiples of 64.
// Output: inner T [N * K, I], row j for place order[j]. Sums and silu in float, one rounding to T.
threadgroup float row_tile[32 * STOA_STRIDE];
threadgroup float gate_tile[32 * STOA_STRIDE];
threadgroup float up_tile[32 * STOA_STRIDE];
threadgroup uint tokens[32];
const uint index = thread_index_in_threadgroup, simdgroup = simdgroup_index_in_threadgroup;
const uint expert = threadgroup_position_in_grid.y, column = threadgroup_position_in_grid.x * STOA_COLUMNS;
const uint first = uint(offsets[expert]), last = uint(offsets[expert + 1]);
const ulong matrix = ulong(expert) * I;

for (uint row = first; row < last; row += 32) {
    const uint num_rows = min(32u, last - row), num_tiles = (num_rows + 7) / 8;
    if (index < num_rows) {
        tokens[index] = uint(order[row + index]) / TOP_K;
    }
    simdgroup_matrix<float, 8, 8> gate_sums[4], up_sums[4];
    stoa_clear<4>(gate_sums);
    stoa_clear<4>(up_sums);
    for (uint k = 0; k < uint(D); k += STOA_STEP) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint i = index; i < num_tiles * 8 * STOA_STEP; i += STOA_THREADS) {
            const uint own = i / STOA_STEP, element = i % STOA_STEP;
            row_tile[own * STOA_STRIDE + element] = own < num_rows ? float(x[ulong(tokens[own]) * D + k + element]) : 0.0f;
        }
        stoa_widen(gate_codes + matrix * (D / 4), gate_scales + matrix * (D / STOA_GROUP), gate_biases + matrix * (D / STOA_GROUP),
                   gate_tile, column, I, D, k, index);
        stoa_widen(up_codes + matrix * (D / 4), up_scales + matrix * (D / STOA_GROUP), up_biases + matrix * (D / STOA_GROUP),
                   up_tile, column, I, D, k, index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        stoa_multiply<4>(row_tile, gate_tile, gate_sums, num_tiles, simdgroup);
        stoa_multiply<4>(row_tile, up_tile, up_sums, num_tiles, simdgroup);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);  // all have read the tiles that now take the sums
    stoa_spill<4>(gate_sums, gate_tile, num_tiles, simdgroup);
    stoa_spill<4>(up_sums, up_tile, num_tiles, simdgroup);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = index; i < num_rows * STOA_COLUMNS; i += STOA_THREADS) {
        const uint own = i / STOA_COLUMNS, element = i % STOA_COLUMNS;
        const float gate = gate_tile[own * STOA_STRIDE + element], up = up_tile[own * STOA_STRIDE + element];
        inner[ulong(row + own) * I + column + element] = static_cast<T>(gate / (1.0f + exp(-gate)) * up);
    }
}
