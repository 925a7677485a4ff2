// K3 and K5, last step: joins the splits of a row's shared prefix, then of its own tokens, by their log-sum-exp.
//
// Grid (32, Q, R), threadgroup 32: one simdgroup a row and query head; a lane has H / 32 elements.
// Inputs: own_parts float [R, Q, splits, H] and own_stats float [R, Q, splits, 2] of paged_attention.metal; prefix_parts and
//   prefix_stats likewise, of prefix_attention.metal, read if PREFIX; starts int [R]; lengths int [R]; sizes int [2], the
//   splits that the own and the prefix arrays have room for.
// Template: typename T, int H (a multiple of 32), bool PREFIX. A row has ceil(starts / 512) splits of the prefix and
//   ceil((lengths - starts) / 512) of its own.
// Output: mixed T [R, Q, H]. In float, one rounding to T.
constexpr uint SPLIT = 512, LANE_ELEMENTS = H / 32;
const uint lane = thread_index_in_simdgroup, head = threadgroup_position_in_grid.y, row = threadgroup_position_in_grid.z;
const ulong query = ulong(row) * threadgroups_per_grid.y + head;
const uint start = uint(starts[row]), num_own = (uint(lengths[row]) - start + SPLIT - 1) / SPLIT;
const uint num_prefix = PREFIX ? (start + SPLIT - 1) / SPLIT : 0;
const ulong own_from = query * uint(sizes[0]), prefix_from = query * uint(sizes[1]);

float top = -INFINITY;
for (uint split = 0; split < num_prefix; ++split) {
    top = max(top, prefix_stats[(prefix_from + split) * 2]);
}
for (uint split = 0; split < num_own; ++split) {
    top = max(top, own_stats[(own_from + split) * 2]);
}
float whole = 0.0f;
float joined[LANE_ELEMENTS];
#pragma clang loop unroll(full)
for (uint j = 0; j < LANE_ELEMENTS; ++j) {
    joined[j] = 0.0f;
}
for (uint split = 0; split < num_prefix; ++split) {
    const float weight = exp(prefix_stats[(prefix_from + split) * 2] - top);
    whole += weight * prefix_stats[(prefix_from + split) * 2 + 1];
    #pragma clang loop unroll(full)
    for (uint j = 0; j < LANE_ELEMENTS; ++j) {
        joined[j] += weight * prefix_parts[(prefix_from + split) * H + j * 32 + lane];
    }
}
for (uint split = 0; split < num_own; ++split) {
    const float weight = exp(own_stats[(own_from + split) * 2] - top);
    whole += weight * own_stats[(own_from + split) * 2 + 1];
    #pragma clang loop unroll(full)
    for (uint j = 0; j < LANE_ELEMENTS; ++j) {
        joined[j] += weight * own_parts[(own_from + split) * H + j * 32 + lane];
    }
}
#pragma clang loop unroll(full)
for (uint j = 0; j < LANE_ELEMENTS; ++j) {
    mixed[query * H + j * 32 + lane] = static_cast<T>(joined[j] / whole);
}
