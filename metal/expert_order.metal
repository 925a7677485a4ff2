// K4, second half: the places token * K + choice sorted by expert, one threadgroup in all.
//
// Grid and threadgroup 1024: simdgroup s goes through the list for experts s, s + 32, .., twice: to count, then to place.
// Places of one expert keep their order, so the outcome is one and the same at each run.
// Inputs: experts uint [N, K]; size int [1], N * K. Template: int E (at most 256).
// Outputs: order int [N * K]; offsets int [E + 1], offsets[E] = N * K; counts int [E].
threadgroup uint found[E];
const uint lane = thread_index_in_simdgroup, simdgroup = simdgroup_index_in_threadgroup, num_places = uint(size[0]);

for (uint expert = simdgroup; expert < uint(E); expert += 32) {
    uint own = 0;
    for (uint place = lane; place < num_places; place += 32) {
        own += uint(experts[place] == expert);
    }
    const uint all = simd_sum(own);
    if (lane == 0) {
        found[expert] = all;
    }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (uint expert = simdgroup; expert < uint(E); expert += 32) {
    uint below = 0;
    for (uint other = lane; other < expert; other += 32) {
        below += found[other];
    }
    const uint begin = simd_sum(below);
    uint next = begin;
    for (uint base = 0; base < num_places; base += 32) {
        const uint place = base + lane;
        const uint here = place < num_places ? uint(experts[place] == expert) : 0u;
        const uint before = simd_prefix_exclusive_sum(here);
        if (here) {
            order[next + before] = int(place);
        }
        next += simd_sum(here);
    }
    if (lane == 0) {
        offsets[expert] = int(begin);
        counts[expert] = int(found[expert]);
        if (expert == uint(E) - 1) {
            offsets[E] = int(num_places);
        }
    }
}
