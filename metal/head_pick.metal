// K2, second half: draw one word a row by the inverse of the cumulative distribution, and give its log-probability.
// Uses int8_tile.metal.
//
// Grid (128 * R, 1, 1), threadgroup 128: one threadgroup a row. The uniform number is given or, if COUNTED, SplitMix64 of
// the row's key and position, its top 23 bits. Its share of the whole sum falls into one block of 32 words, whose logits are
// made again with the same operations as in head_partial.metal, hence the same bits; then it falls on one word of that block: the first
// whose cumulative sum passes it. A word of probability 0 is never drawn.
// Inputs: x T [R, D]; codes uint [V, D / 4]; scales, biases bfloat [V, D / 64]; highest, sums float [R, blocks];
//   uniform float [R], a multiple of 2^-23 below 1, read if not COUNTED; keys uint64 [R] and positions int64 [R], read if
//   COUNTED; size int [2], blocks and V.
// Template: int D (a multiple of 64), bool COUNTED.
// Outputs: tokens int [R]; logprobs float [R], natural logarithm, at most 0.
threadgroup float row_tile[8 * STOA_STRIDE];
threadgroup float word_tile[32 * STOA_STRIDE];
threadgroup float shared_parts[4];
threadgroup uint shared_places[4];
threadgroup float chosen_before[1];
const uint index = thread_index_in_threadgroup, simdgroup = simdgroup_index_in_threadgroup, lane = thread_index_in_simdgroup;
const uint row = threadgroup_position_in_grid.x, num_blocks = uint(size[0]), num_words = uint(size[1]);
const ulong from = ulong(row) * num_blocks;
const uint share = (num_blocks + STOA_THREADS - 1) / STOA_THREADS;  // each thread has this many blocks, one after another
const uint first = min(index * share, num_blocks), last = min(first + share, num_blocks);

float top = -INFINITY;
for (uint block = first; block < last; ++block) {
    top = max(top, highest[from + block]);
}
top = simd_max(top);
if (lane == 0) {
    shared_parts[simdgroup] = top;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
top = max(max(shared_parts[0], shared_parts[1]), max(shared_parts[2], shared_parts[3]));
threadgroup_barrier(mem_flags::mem_threadgroup);

float own = 0.0f;
for (uint block = first; block < last; ++block) {
    own += sums[from + block] * exp(highest[from + block] - top);
}
float before = simd_prefix_exclusive_sum(own);
const float part = simd_sum(own);
if (lane == 0) {
    shared_parts[simdgroup] = part;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
float total = 0.0f;
for (uint other = 0; other < 4; ++other) {
    before += other < simdgroup ? shared_parts[other] : 0.0f;
    total += shared_parts[other];
}

float share_of_all = 0.0f;
if (COUNTED) {
    ulong z = keys[row] + (ulong(positions[row]) + 1ul) * 0x9E3779B97F4A7C15ul;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ul;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBul;
    z = z ^ (z >> 31);
    share_of_all = float(uint(z >> 41)) * (1.0f / 8388608.0f);
} else {
    share_of_all = uniform[row];
}
const float target = share_of_all * total;

// The first thread whose blocks pass the target; if rounding lets none pass, the last thread that has something.
const uint passes = own > 0.0f && before + own > target ? index : 0xffffffffu;
const uint nearest = simd_min(passes);
const uint latest = simd_max(own > 0.0f ? index + 1 : 0u);
if (lane == 0) {
    shared_places[simdgroup] = nearest;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
uint owner = min(min(shared_places[0], shared_places[1]), min(shared_places[2], shared_places[3]));
threadgroup_barrier(mem_flags::mem_threadgroup);
if (lane == 0) {
    shared_places[simdgroup] = latest;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
if (owner == 0xffffffffu) {
    const uint last_one = max(max(shared_places[0], shared_places[1]), max(shared_places[2], shared_places[3]));
    owner = max(last_one, 1u) - 1;  // where no logit is a number the first thread takes its first block
}
threadgroup_barrier(mem_flags::mem_threadgroup);
if (index == owner) {
    float running = before, begin = before;
    uint chosen = first;
    for (uint block = first; block < last; ++block) {
        const float mass = sums[from + block] * exp(highest[from + block] - top);
        if (mass > 0.0f) {
            chosen = block;
            begin = running;
        }
        running += mass;
        if (mass > 0.0f && running > target) {
            break;
        }
    }
    shared_places[0] = chosen;
    chosen_before[0] = begin;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
const uint block = shared_places[0];

simdgroup_matrix<float, 8, 8> logits[1];
stoa_clear<1>(logits);
for (uint k = 0; k < uint(D); k += STOA_STEP) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = index; i < 8 * STOA_STEP; i += STOA_THREADS) {
        const uint line = i / STOA_STEP, element = i % STOA_STEP;
        row_tile[line * STOA_STRIDE + element] = line == 0 ? float(x[ulong(row) * D + k + element]) : 0.0f;
    }
    stoa_widen(codes, scales, biases, word_tile, block * STOA_COLUMNS, num_words, D, k, index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    stoa_multiply<1>(row_tile, word_tile, logits, 1, simdgroup);
}
threadgroup_barrier(mem_flags::mem_threadgroup);  // all have read the tile that now takes the logits
stoa_spill<1>(logits, row_tile, 1, simdgroup);
threadgroup_barrier(mem_flags::mem_threadgroup);
if (simdgroup > 0) {
    return;
}

const bool real = block * STOA_COLUMNS + lane < num_words;
const float logit = real ? row_tile[lane] : -INFINITY;
const float mass = exp(logit - top);
const float until = chosen_before[0] + simd_prefix_inclusive_sum(mass);
const uint passing = simd_min(mass > 0.0f && until > target ? lane : 32u);
const uint furthest = simd_max(mass > 0.0f ? lane : 0u);
const uint pick = passing < 32 ? passing : furthest;
const float picked = simd_shuffle(logit, ushort(pick));
if (lane == 0) {
    tokens[row] = int(block * STOA_COLUMNS + pick);
    const float logprob = picked - top - log(total);
    logprobs[row] = logprob > 0.0f ? 0.0f : logprob;  // min() would make a probability of 1 of what is no number
}
