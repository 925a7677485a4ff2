// Shared by bodies that multiply rows by int8 group-64 matrices: pieces of a tile of up to 8 * TILES rows by 32 columns.
//
// A threadgroup has 128 threads, 4 simdgroups of 8 columns each, and goes through the inner dimension in steps of 32.
// Weights are widened to float as scale * code + bias (exact: 8 bits times 8 bits fit a float's 24) and multiplied in float.
// Each output is a sum over its own row in one order, so a row's result does not depend on the rows beside it.
// Tiles have a row stride of 36 floats, which spreads their rows over the banks of threadgroup memory.
constexpr constant uint STOA_STEP = 32;
constexpr constant uint STOA_STRIDE = 36;
constexpr constant uint STOA_GROUP = 64;
constexpr constant uint STOA_COLUMNS = 32;
constexpr constant uint STOA_THREADS = 128;

// Widens columns [column, column + 32) of rows [num_columns, inner], inner elements [k, k + 32), into `tile`.
// Pointers start at the matrix. Columns from num_columns on become 0.
template <typename Codes, typename Scales>
inline void stoa_widen(Codes codes, Scales scales, Scales biases, threadgroup float* tile, uint column, uint num_columns, uint inner,
                       uint k, uint index) {
    for (uint i = index; i < STOA_COLUMNS * STOA_STEP / 4; i += STOA_THREADS) {
        const uint own = i / 8, word = i % 8;
        threadgroup float* to = tile + own * STOA_STRIDE + word * 4;
        if (column + own < num_columns) {
            const ulong row = column + own;
            const uint packed = codes[row * (inner / 4) + k / 4 + word];
            const ulong group = row * (inner / STOA_GROUP) + k / STOA_GROUP;
            const float scale = float(scales[group]), bias = float(biases[group]);
            #pragma clang loop unroll(full)
            for (uint byte = 0; byte < 4; ++byte) {
                to[byte] = scale * float((packed >> (8 * byte)) & 0xffu) + bias;
            }
        } else {
            for (uint byte = 0; byte < 4; ++byte) {
                to[byte] = 0.0f;
            }
        }
    }
}

// sums[t] += rows 8 t .. 8 t + 7 of `rows` times this simdgroup's 8 columns of `columns`, for t < num_tiles.
template <int TILES>
inline void stoa_multiply(threadgroup const float* rows, threadgroup const float* columns, thread simdgroup_matrix<float, 8, 8>* sums,
                          uint num_tiles, uint simdgroup) {
    #pragma clang loop unroll(full)
    for (uint k = 0; k < STOA_STEP; k += 8) {
        simdgroup_matrix<float, 8, 8> right;
        simdgroup_load(right, columns + simdgroup * 8 * STOA_STRIDE + k, STOA_STRIDE, 0, true);
        #pragma clang loop unroll(full)
        for (uint tile = 0; tile < uint(TILES); ++tile) {
            if (tile < num_tiles) {
                simdgroup_matrix<float, 8, 8> left;
                simdgroup_load(left, rows + tile * 8 * STOA_STRIDE + k, STOA_STRIDE);
                simdgroup_multiply_accumulate(sums[tile], left, right, sums[tile]);
            }
        }
    }
}

template <int TILES>
inline void stoa_clear(thread simdgroup_matrix<float, 8, 8>* sums) {
    #pragma clang loop unroll(full)
    for (uint tile = 0; tile < uint(TILES); ++tile) {
        sums[tile] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
}

// Writes sums to `tile`, row stride 36, this simdgroup's 8 columns.
template <int TILES>
inline void stoa_spill(thread simdgroup_matrix<float, 8, 8>* sums, threadgroup float* tile, uint num_tiles, uint simdgroup) {
    #pragma clang loop unroll(full)
    for (uint t = 0; t < uint(TILES); ++t) {
        if (t < num_tiles) {
            simdgroup_store(sums[t], tile + t * 8 * STOA_STRIDE + simdgroup * 8, STOA_STRIDE);
        }
    }
}
