// K3: attention of rows of one token over pages, in splits of 512 tokens whose results attention_merge.metal joins.
//
// Grid (128 * splits, G, R), threadgroup 128: one threadgroup a row, key/value head and split; the HEADS query heads that
// share it are computed from one load of each key and value. Simdgroup s takes pages s, s + 4, .. of the split: a lane
// scores one token of the page for all heads, then holds H / 32 elements of the output while the page's values go by.
// Splits count from the row's start, so nothing depends on other rows. W rows, one after the other, are tokens of one
// sequence and share its table. A sequence's last page may come from tail arrays.
// Inputs: q T [R, Q, H]; keys, values T [pages, G, 32, H]; tail_keys, tail_values T [R / W, G, 32, H], read if TAIL;
//   table int [R / W, P], pages of each sequence; starts int [R], first token to attend to, a multiple of 32; lengths int [R],
//   tokens seen, the row's own included; scale float [1]; width int [1], W.
// Template: int G, int HEADS (Q / G), int H (a multiple of 32), bool TAIL.
// Outputs, undefined in splits that a row does not have: parts float [R, Q, splits, H], sums of exp(score - highest) * value;
//   stats float [R, Q, splits, 2], the highest score and the sum of exp(score - highest).
constexpr uint PAGE = 32, SPLIT = 512, LANE_ELEMENTS = H / 32;
threadgroup float queries[HEADS * H];
threadgroup float simd_parts[4 * HEADS * H];
threadgroup float simd_highest[4 * HEADS];
threadgroup float simd_sums[4 * HEADS];
const uint index = thread_index_in_threadgroup, simdgroup = simdgroup_index_in_threadgroup, lane = thread_index_in_simdgroup;
const uint split = threadgroup_position_in_grid.x, num_splits = threadgroups_per_grid.x;
const uint head = threadgroup_position_in_grid.y, row = threadgroup_position_in_grid.z;
const uint length = uint(lengths[row]), first = uint(starts[row]) + split * SPLIT, last = min(first + SPLIT, length);
if (first >= last) {
    return;
}
const uint sequence = row / uint(width[0]);
const ulong first_page = ulong(sequence) * table_shape[1];
const ulong first_query = (ulong(row) * G + head) * HEADS;
for (uint i = index; i < uint(HEADS * H); i += 128) {
    queries[i] = float(q[first_query * H + i]) * scale[0];
}
threadgroup_barrier(mem_flags::mem_threadgroup);

float highest[HEADS];
float sum[HEADS];
float part[HEADS * LANE_ELEMENTS];
#pragma clang loop unroll(full)
for (uint h = 0; h < uint(HEADS); ++h) {
    highest[h] = -INFINITY;
    sum[h] = 0.0f;
    #pragma clang loop unroll(full)
    for (uint j = 0; j < LANE_ELEMENTS; ++j) {
        part[h * LANE_ELEMENTS + j] = 0.0f;
    }
}
for (uint page = first / PAGE + simdgroup; page * PAGE < last; page += 4) {
    const bool from_tail = TAIL && page == (length - 1) / PAGE;
    const ulong base = from_tail ? (ulong(sequence) * G + head) * PAGE * H : (ulong(table[first_page + page]) * G + head) * PAGE * H;
    const uint num_tokens = min(PAGE, last - page * PAGE);
    float score[HEADS];
    #pragma clang loop unroll(full)
    for (uint h = 0; h < uint(HEADS); ++h) {
        score[h] = 0.0f;
    }
    if (lane < num_tokens) {
        for (uint d = 0; d < uint(H); ++d) {
            const ulong place = base + lane * H + d;
            const float key = TAIL && from_tail ? float(tail_keys[place]) : float(keys[place]);
            #pragma clang loop unroll(full)
            for (uint h = 0; h < uint(HEADS); ++h) {
                score[h] += queries[h * H + d] * key;
            }
        }
    }
    #pragma clang loop unroll(full)
    for (uint h = 0; h < uint(HEADS); ++h) {
        const float seen = lane < num_tokens ? score[h] : -INFINITY;
        const float top = max(highest[h], simd_max(seen));
        const float shrink = exp(highest[h] - top);
        highest[h] = top;
        score[h] = exp(seen - top);
        sum[h] = sum[h] * shrink + score[h];
        #pragma clang loop unroll(full)
        for (uint j = 0; j < LANE_ELEMENTS; ++j) {
            part[h * LANE_ELEMENTS + j] *= shrink;
        }
    }
    for (uint token = 0; token < num_tokens; ++token) {
        float value[LANE_ELEMENTS];
        #pragma clang loop unroll(full)
        for (uint j = 0; j < LANE_ELEMENTS; ++j) {
            const ulong place = base + token * H + j * 32 + lane;
            value[j] = TAIL && from_tail ? float(tail_values[place]) : float(values[place]);
        }
        #pragma clang loop unroll(full)
        for (uint h = 0; h < uint(HEADS); ++h) {
            const float weight = simd_shuffle(score[h], ushort(token));
            #pragma clang loop unroll(full)
            for (uint j = 0; j < LANE_ELEMENTS; ++j) {
                part[h * LANE_ELEMENTS + j] += weight * value[j];
            }
        }
    }
}

#pragma clang loop unroll(full)
for (uint h = 0; h < uint(HEADS); ++h) {
    const float whole = simd_sum(sum[h]);
    if (lane == 0) {
        simd_highest[simdgroup * HEADS + h] = highest[h];
        simd_sums[simdgroup * HEADS + h] = whole;
    }
    #pragma clang loop unroll(full)
    for (uint j = 0; j < LANE_ELEMENTS; ++j) {
        simd_parts[(simdgroup * HEADS + h) * H + j * 32 + lane] = part[h * LANE_ELEMENTS + j];
    }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (uint i = index; i < uint(HEADS * H); i += 128) {
    const uint h = i / H, d = i % H;
    float top = -INFINITY;
    for (uint s = 0; s < 4; ++s) {
        top = max(top, simd_highest[s * HEADS + h]);
    }
    float joined = 0.0f, whole = 0.0f;
    for (uint s = 0; s < 4; ++s) {  // a simdgroup without a page has the highest score -inf, hence weight 0
        const float weight = exp(simd_highest[s * HEADS + h] - top);
        joined += weight * simd_parts[(s * HEADS + h) * H + d];
        whole += weight * simd_sums[s * HEADS + h];
    }
    const ulong at = (first_query + h) * num_splits + split;
    parts[at * H + d] = joined;
    if (d == 0) {
        stats[at * 2] = top;
        stats[at * 2 + 1] = whole;
    }
}
