// K1, second half: each place's share of the output, weight * (inner . down^T). Uses int8_tile.metal.
//
// Grid (128 * columns / 32, experts, 1), threadgroup 128: as experts_up.metal.
// Inputs: inner T [N * K, I], order int [N * K] and offsets int [E + 1] as there; weights float [N * K] by place;
//   codes uint [E, D, I / 4]; scales, biases bfloat [E, D, I / 64].
// Template: typename T, int D, int I. D and I are multiples of 64.
// Output: shares T [N * K, D], row order[j] for row j of inner. Sums in float, one rounding to T.
threadgroup float row_tile[32 * STOA_STRIDE];
threadgroup float down_tile[32 * STOA_STRIDE];
const uint index = thread_index_in_threadgroup, simdgroup = simdgroup_index_in_threadgroup;
const uint expert = threadgroup_position_in_grid.y, column = threadgroup_position_in_grid.x * STOA_COLUMNS;
const uint first = uint(offsets[expert]), last = uint(offsets[expert + 1]);
const ulong matrix = ulong(expert) * D;

for (uint row = first; row < last; row += 32) {
    const uint num_rows = min(32u, last - row), num_tiles = (num_rows + 7) / 8;
    simdgroup_matrix<float, 8, 8> sums[4];
    stoa_clear<4>(sums);
    for (uint k = 0; k < uint(I); k += STOA_STEP) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint i = index; i < num_tiles * 8 * STOA_STEP; i += STOA_THREADS) {
            const uint own = i / STOA_STEP, element = i % STOA_STEP;
            row_tile[own * STOA_STRIDE + element] = own < num_rows ? float(inner[ulong(row + own) * I + k + element]) : 0.0f;
        }
        stoa_widen(codes + matrix * (I / 4), scales + matrix * (I / STOA_GROUP), biases + matrix * (I / STOA_GROUP), down_tile, column, D,
                   I, k, index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        stoa_multiply<4>(row_tile, down_tile, sums, num_tiles, simdgroup);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);  // all have read the tile that now takes the sums
    stoa_spill<4>(sums, down_tile, num_tiles, simdgroup);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = index; i < num_rows * STOA_COLUMNS; i += STOA_THREADS) {
        const uint own = i / STOA_COLUMNS, element = i % STOA_COLUMNS;
        const uint place = uint(order[row + own]);
        shares[ulong(place) * D + column + element] = static_cast<T>(down_tile[own * STOA_STRIDE + element] * float(weights[place]));
    }
}
