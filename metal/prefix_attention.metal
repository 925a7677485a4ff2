// K5: attention of the rows of a group over the prompt they share, whose keys and values are loaded once for all of them.
//
// Grid (128 * splits, G, groups), threadgroup 128: one threadgroup a group, key/value head and split of 512 tokens. Its query
// rows, member * HEADS + head, at most 32, are multiplied as 8 x 8 tiles, 8 rows a simdgroup; a page of 32 tokens at a time.
// A query row's result does not depend on the other members, so it is the same alone and in a full group.
// Inputs: q T [R, Q, H]; keys, values T [pages, G, 32, H]; table int [R / W, P], pages of each sequence of W rows;
//   members int [groups, M], rows of each group, the first always one, -1 for none; prefix int [groups], tokens shared, a
//   multiple of 32; scale float [1]; width int [1], W.
// Template: int G, int HEADS (Q / G), int H (a multiple of 8, at most 64), int M. M * HEADS is at most 32.
// Outputs, undefined for rows in no group and splits a group does not have: as paged_attention.metal,
//   parts float [R, Q, splits, H]; stats float [R, Q, splits, 2].
constexpr uint PAGE = 32, SPLIT = 512, WIDE = H + 4, NARROW = PAGE + 4, TILES = H / 8;
threadgroup float query_tile[32 * WIDE];
threadgroup float page_tile[PAGE * WIDE];
threadgroup float score_tile[32 * NARROW];
threadgroup float shrink_tile[4 * 64];
const uint index = thread_index_in_threadgroup, simdgroup = simdgroup_index_in_threadgroup, lane = thread_index_in_simdgroup;
const uint split = threadgroup_position_in_grid.x, num_splits = threadgroups_per_grid.x;
const uint head = threadgroup_position_in_grid.y, group = threadgroup_position_in_grid.z;
const uint first = split * SPLIT, last = min(first + SPLIT, uint(prefix[group]));
if (first >= last) {
    return;
}
for (uint i = index; i < 32 * uint(H); i += 128) {
    const uint line = i / H, d = i % H, member = line / HEADS;
    const int row = member < uint(M) ? int(members[group * M + member]) : -1;
    query_tile[line * WIDE + d] = row < 0 ? 0.0f : float(q[((ulong(row) * G + head) * HEADS + line % HEADS) * H + d]) * scale[0];
}
shrink_tile[index] = 0.0f;
shrink_tile[index + 128] = 0.0f;
threadgroup float* own_scores = score_tile + simdgroup * 8 * NARROW;
threadgroup float* own_shrink = shrink_tile + simdgroup * 64;
threadgroup float* own_queries = query_tile + simdgroup * 8 * WIDE;
const ulong first_page = ulong(uint(members[group * M]) / uint(width[0])) * table_shape[1];

float highest[8];
float sum[8];
simdgroup_matrix<float, 8, 8> mixed[TILES];
#pragma clang loop unroll(full)
for (uint line = 0; line < 8; ++line) {
    highest[line] = -INFINITY;
    sum[line] = 0.0f;
}
#pragma clang loop unroll(full)
for (uint tile = 0; tile < TILES; ++tile) {
    mixed[tile] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
}
for (uint page = first / PAGE; page * PAGE < last; ++page) {
    const ulong base = (ulong(table[first_page + page]) * G + head) * PAGE * H;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = index; i < PAGE * uint(H); i += 128) {
        page_tile[i / H * WIDE + i % H] = float(keys[base + i]);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint tile = 0; tile < 4; ++tile) {  // scores of 8 tokens
        simdgroup_matrix<float, 8, 8> scores = make_filled_simdgroup_matrix<float, 8, 8>(0.0f), left, right;
        for (uint d = 0; d < uint(H); d += 8) {
            simdgroup_load(left, own_queries + d, WIDE);
            simdgroup_load(right, page_tile + tile * 8 * WIDE + d, WIDE, 0, true);
            simdgroup_multiply_accumulate(scores, left, right, scores);
        }
        simdgroup_store(scores, own_scores + tile * 8, NARROW);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = index; i < PAGE * uint(H); i += 128) {
        page_tile[i / H * WIDE + i % H] = float(values[base + i]);
    }
    #pragma clang loop unroll(full)
    for (uint line = 0; line < 8; ++line) {  // a lane has one token
        const float score = own_scores[line * NARROW + lane];
        const float top = max(highest[line], simd_max(score));
        const float shrink = exp(highest[line] - top), weight = exp(score - top);
        highest[line] = top;
        sum[line] = sum[line] * shrink + weight;
        own_scores[line * NARROW + lane] = weight;
        if (lane == 0) {
            own_shrink[line * 8 + line] = shrink;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_matrix<float, 8, 8> shrink, left, right;
    simdgroup_load(shrink, own_shrink, 8);
    #pragma clang loop unroll(full)
    for (uint tile = 0; tile < TILES; ++tile) {
        simdgroup_matrix<float, 8, 8> shrunk;
        simdgroup_multiply(shrunk, shrink, mixed[tile]);
        mixed[tile] = shrunk;
    }
    for (uint token = 0; token < PAGE; token += 8) {
        simdgroup_load(left, own_scores + token, NARROW);
        #pragma clang loop unroll(full)
        for (uint tile = 0; tile < TILES; ++tile) {
            simdgroup_load(right, page_tile + token * WIDE + tile * 8, WIDE);
            simdgroup_multiply_accumulate(mixed[tile], left, right, mixed[tile]);
        }
    }
}

simdgroup_barrier(mem_flags::mem_threadgroup);  // this simdgroup has read its queries, whose place takes the result
#pragma clang loop unroll(full)
for (uint tile = 0; tile < TILES; ++tile) {
    simdgroup_store(mixed[tile], own_queries + tile * 8, WIDE);
}
simdgroup_barrier(mem_flags::mem_threadgroup);
#pragma clang loop unroll(full)
for (uint line = 0; line < 8; ++line) {
    const float whole = simd_sum(sum[line]);
    const uint query = simdgroup * 8 + line, member = query / HEADS;
    const int row = member < uint(M) ? int(members[group * M + member]) : -1;
    if (row >= 0) {
        const ulong at = ((ulong(row) * G + head) * HEADS + query % HEADS) * num_splits + split;
        for (uint d = lane; d < uint(H); d += 32) {
            parts[at * H + d] = own_queries[line * WIDE + d];
        }
        if (lane == 0) {
            stats[at * 2] = highest[line];
            stats[at * 2 + 1] = whole;
        }
    }
}
