// The vocabulary of the Metal Shading Language that the bodies in metal/ use, for a C++ compiler on a CPU.
//
// Address spaces are erased here (lint.h checks them). Each Metal thread is a fiber of runtime.cpp; what lanes exchange
// goes through `emu_meet`, where all 32 lanes of a simdgroup wait for each other at one place of the source. Loads and
// stores of the body are reported to runtime.cpp by the compiler's own instrumentation, so nothing here checks memory.
#pragma once
#pragma clang system_header

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long uint64_t;
typedef unsigned long size_t;

#define EMU_VECTORS(T)                                      \
    typedef T T##2 __attribute__((ext_vector_type(2)));     \
    typedef T T##3 __attribute__((ext_vector_type(3)));     \
    typedef T T##4 __attribute__((ext_vector_type(4)));
EMU_VECTORS(float)
EMU_VECTORS(uint)
EMU_VECTORS(int)
EMU_VECTORS(ulong)

#define device
#define constant
#define threadgroup
#define thread
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define FLT_MAX __FLT_MAX__
#define MAXFLOAT __FLT_MAX__

struct EmuThread {  // what MLX passes to a body that names it
    uint3 thread_position_in_grid, thread_position_in_threadgroup, threadgroup_position_in_grid;
    uint3 threads_per_threadgroup, threads_per_grid, threadgroups_per_grid;
    uint thread_index_in_threadgroup, thread_index_in_simdgroup, simdgroup_index_in_threadgroup;
    uint simdgroups_per_threadgroup, threads_per_simdgroup;
};

struct EmuBoard {  // what the lanes of a simdgroup handed in at the last meeting
    uint words[32][4];
};

extern "C" {
const EmuThread* emu_thread();
// All lanes of the simdgroup hand in up to 16 bytes; returns once all have come to this same line and column.
const EmuBoard* emu_meet(const char* what, uint line, uint column, const uint* words, uint num_words);
// `orders`: threadgroup memory, as the flags say; a barrier for other memory only makes threads wait.
void emu_barrier(bool whole_threadgroup, bool orders, uint line, uint column);
void* emu_threadgroup_memory(uint id, size_t bytes, const char* name);
void emu_touch(const void* address, size_t bytes, bool writes);  // for loads and stores made by this header
float emu_exp(float), emu_exp2(float), emu_log(float), emu_log2(float), emu_sqrt(float);
}
#define EMU_PLACE uint line = __builtin_LINE(), uint column = __builtin_COLUMN()
#define EMU_OWN __attribute__((disable_sanitizer_instrumentation))

// `threadgroup T name[N];` becomes this (source.py); ids number the declarations.
template <typename T, uint ID> T& emu_threadgroup(const char* name) {
    return *static_cast<T*>(emu_threadgroup_memory(ID, sizeof(T), name));
}

template <typename To, typename From> inline To emu_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "as_type needs equal sizes");
    To to;
    __builtin_memcpy(&to, &from, sizeof(To));
    return to;
}

// 16-bit floats: stored as bits, computed in float, rounded to nearest even after each operation.
inline ushort emu_round_bfloat(float x) {
    uint bits = emu_bits<uint>(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return ushort((bits >> 16) | 0x40u);
    return ushort((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
inline float emu_widen_bfloat(ushort bits) { return emu_bits<float>(uint(bits) << 16); }
inline ushort emu_round_half(float x) {
    const uint bits = emu_bits<uint>(x), sign = (bits >> 16) & 0x8000u, size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) return ushort(sign | 0x7e00u);
    if (size >= 0x47800000u) return ushort(sign | 0x7c00u);  // 65536 and more
    if (size < 0x33000000u) return ushort(sign);             // at most half of the smallest subnormal, ties go to even
    uint kept, lost, halfway;
    if (size < 0x38800000u) {  // subnormal: the mantissa with its hidden bit, shifted
        const uint shift = 126u - (size >> 23), mantissa = (size & 0x7fffffu) | 0x800000u;
        kept = mantissa >> shift, lost = mantissa & ((1u << shift) - 1u), halfway = 1u << (shift - 1u);
    } else {
        kept = (size - 0x38000000u) >> 13, lost = size & 0x1fffu, halfway = 0x1000u;
    }
    if (lost > halfway || (lost == halfway && (kept & 1u))) ++kept;
    return ushort(sign | kept);
}
inline float emu_widen_half(ushort bits) {
    const uint sign = uint(bits & 0x8000u) << 16, exponent = (bits >> 10) & 31u, mantissa = bits & 0x3ffu;
    if (exponent == 31u) return emu_bits<float>(sign | 0x7f800000u | (mantissa << 13));
    if (exponent == 0u) return emu_bits<float>(sign | emu_bits<uint>(float(mantissa) * 0x1p-24f));
    return emu_bits<float>(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

#define EMU_SMALL_FLOAT(NAME, ROUND, WIDEN)                                                              \
    struct NAME {                                                                                        \
        ushort bits;                                                                                     \
        NAME() = default;                                                                                \
        explicit NAME(float x) : bits(ROUND(x)) {}                                                       \
        explicit NAME(int x) : bits(ROUND(float(x))) {}                                                  \
        explicit NAME(uint x) : bits(ROUND(float(x))) {}                                                 \
        operator float() const { return WIDEN(bits); }                                                   \
        friend NAME operator+(NAME a, NAME b) { return NAME(float(a) + float(b)); }                      \
        friend NAME operator-(NAME a, NAME b) { return NAME(float(a) - float(b)); }                      \
        friend NAME operator*(NAME a, NAME b) { return NAME(float(a) * float(b)); }                      \
        friend NAME operator/(NAME a, NAME b) { return NAME(float(a) / float(b)); }                      \
        friend NAME operator-(NAME a) { return NAME(-float(a)); }                                        \
        friend float operator+(NAME a, float b) { return float(a) + b; }                                 \
        friend float operator+(float a, NAME b) { return a + float(b); }                                 \
        friend float operator-(NAME a, float b) { return float(a) - b; }                                 \
        friend float operator-(float a, NAME b) { return a - float(b); }                                 \
        friend float operator*(NAME a, float b) { return float(a) * b; }                                 \
        friend float operator*(float a, NAME b) { return a * float(b); }                                 \
    };
EMU_SMALL_FLOAT(bfloat, emu_round_bfloat, emu_widen_bfloat)
EMU_SMALL_FLOAT(half, emu_round_half, emu_widen_half)
typedef bfloat bfloat16_t;
typedef half float16_t;

template <typename To, typename From> inline To as_type(From from) { return emu_bits<To>(from); }

namespace metal {
enum class mem_flags { mem_none, mem_device, mem_threadgroup };

// Of a number and what is none, the number, as the hardware's do.
template <typename T> inline T min(T a, T b) { return b < a || a != a ? b : a; }
template <typename T> inline T max(T a, T b) { return a < b || a != a ? b : a; }
template <typename T> inline T clamp(T x, T low, T high) { return min(max(x, low), high); }
template <typename T> inline T select(T if_false, T if_true, bool which) { return which ? if_true : if_false; }
inline float exp(float x) { return emu_exp(x); }
inline float exp2(float x) { return emu_exp2(x); }
inline float log(float x) { return emu_log(x); }
inline float log2(float x) { return emu_log2(x); }
inline float sqrt(float x) { return emu_sqrt(x); }
inline float rsqrt(float x) { return 1.0f / emu_sqrt(x); }
inline float abs(float x) { return __builtin_fabsf(x); }
inline float fabs(float x) { return __builtin_fabsf(x); }
inline bool isnan(float x) { return x != x; }
inline bool isinf(float x) { return __builtin_fabsf(x) == INFINITY; }
inline uint popcount(uint x) { return uint(__builtin_popcount(x)); }
inline uint ctz(uint x) { return x ? uint(__builtin_ctz(x)) : 32u; }
inline uint clz(uint x) { return x ? uint(__builtin_clz(x)) : 32u; }
inline float dot(float4 a, float4 b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }
namespace precise { using metal::exp; using metal::exp2; using metal::log; using metal::log2; using metal::sqrt; using metal::rsqrt; }

EMU_OWN inline void threadgroup_barrier(mem_flags flags, EMU_PLACE) {
    emu_barrier(true, flags == mem_flags::mem_threadgroup, line, column);
}
EMU_OWN inline void simdgroup_barrier(mem_flags flags, EMU_PLACE) {
    emu_barrier(false, flags == mem_flags::mem_threadgroup, line, column);
}

// What lanes exchange. A reduction adds in the order of a butterfly, as the hardware's does more or less.
template <typename T> EMU_OWN inline T emu_lane(const EmuBoard* board, uint lane) {
    T found;
    __builtin_memcpy(&found, board->words[lane], sizeof(T));
    return found;
}
template <typename T> EMU_OWN inline const EmuBoard* emu_hand_in(const char* what, T value, uint line, uint column) {
    static_assert(sizeof(T) <= 8, "lanes exchange at most 8 bytes");
    uint words[2] = {0, 0};
    __builtin_memcpy(words, &value, sizeof(T));
    return emu_meet(what, line, column, words, 2);
}
template <typename T, typename F> EMU_OWN inline T emu_butterfly(const char* what, T value, F combine, uint line, uint column) {
    const EmuBoard* board = emu_hand_in(what, value, line, column);
    T all[32];
    for (uint lane = 0; lane < 32; ++lane) all[lane] = emu_lane<T>(board, lane);
    for (uint distance = 16; distance; distance >>= 1)
        for (uint lane = 0; lane < distance; ++lane) all[lane] = combine(all[lane], all[lane + distance]);
    return all[0];
}
#define EMU_REDUCE(NAME, EXPRESSION)                                                                  \
    template <typename T> EMU_OWN inline T NAME(T value, EMU_PLACE) {                                 \
        return emu_butterfly(#NAME, value, [](T a, T b) EMU_OWN { return T(EXPRESSION); }, line, column); \
    }
EMU_REDUCE(simd_sum, a + b)
EMU_REDUCE(simd_product, a* b)
EMU_REDUCE(simd_min, metal::min(a, b))
EMU_REDUCE(simd_max, metal::max(a, b))
EMU_REDUCE(simd_and, a & b)
EMU_REDUCE(simd_or, a | b)
EMU_REDUCE(simd_xor, a ^ b)
template <typename T> EMU_OWN inline T simd_prefix_exclusive_sum(T value, EMU_PLACE) {
    const EmuBoard* board = emu_hand_in("simd_prefix_exclusive_sum", value, line, column);
    T sum = T(0);
    for (uint lane = 0; lane < emu_thread()->thread_index_in_simdgroup; ++lane) sum = sum + emu_lane<T>(board, lane);
    return sum;
}
template <typename T> EMU_OWN inline T simd_prefix_inclusive_sum(T value, EMU_PLACE) {
    return simd_prefix_exclusive_sum(value, line, column) + value;
}
template <typename T> EMU_OWN inline T emu_from(const char* what, T value, uint lane, uint line, uint column) {
    const EmuBoard* board = emu_hand_in(what, value, line, column);
    return lane < 32 ? emu_lane<T>(board, lane) : value;
}
template <typename T> EMU_OWN inline T simd_shuffle(T value, ushort lane, EMU_PLACE) {
    return emu_from("simd_shuffle", value, lane, line, column);
}
template <typename T> EMU_OWN inline T simd_shuffle_xor(T value, ushort mask, EMU_PLACE) {
    return emu_from("simd_shuffle_xor", value, emu_thread()->thread_index_in_simdgroup ^ mask, line, column);
}
template <typename T> EMU_OWN inline T simd_shuffle_down(T value, ushort delta, EMU_PLACE) {
    return emu_from("simd_shuffle_down", value, emu_thread()->thread_index_in_simdgroup + delta, line, column);
}
template <typename T> EMU_OWN inline T simd_shuffle_up(T value, ushort delta, EMU_PLACE) {
    return emu_from("simd_shuffle_up", value, emu_thread()->thread_index_in_simdgroup - delta, line, column);
}
template <typename T> EMU_OWN inline T simd_broadcast(T value, ushort lane, EMU_PLACE) {
    return emu_from("simd_broadcast", value, lane, line, column);
}
template <typename T> EMU_OWN inline T simd_broadcast_first(T value, EMU_PLACE) {
    return emu_from("simd_broadcast_first", value, 0, line, column);
}
struct simd_vote {
    ulong bits;
    operator ulong() const { return bits; }
};
EMU_OWN inline simd_vote simd_ballot(bool yes, EMU_PLACE) {
    const EmuBoard* board = emu_hand_in("simd_ballot", uint(yes), line, column);
    simd_vote vote{0};
    for (uint lane = 0; lane < 32; ++lane) vote.bits |= ulong(board->words[lane][0] & 1u) << lane;
    return vote;
}
EMU_OWN inline bool simd_any(bool yes, EMU_PLACE) { return ulong(simd_ballot(yes, line, column)) != 0; }
EMU_OWN inline bool simd_all(bool yes, EMU_PLACE) { return ulong(simd_ballot(yes, line, column)) == 0xffffffffu; }
EMU_OWN inline bool simd_is_first(EMU_PLACE) { return emu_thread()->thread_index_in_simdgroup == 0; }

// An 8 x 8 matrix that a simdgroup holds together: lane l has row l / 4, columns 2 * (l % 4) and the next.
template <typename T, int ROWS, int COLUMNS> struct simdgroup_matrix {
    static_assert(ROWS == 8 && COLUMNS == 8, "only 8 x 8");
    T own[2];
    simdgroup_matrix() = default;
    EMU_OWN explicit simdgroup_matrix(T diagonal) {
        const uint lane = emu_thread()->thread_index_in_simdgroup, row = lane / 4, column = 2 * (lane % 4);
        own[0] = row == column ? diagonal : T(0.0f), own[1] = row == column + 1 ? diagonal : T(0.0f);
    }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
template <typename T, int R, int C> EMU_OWN inline simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T value) {
    simdgroup_matrix<T, R, C> made;
    made.own[0] = made.own[1] = value;
    return made;
}
template <typename T> EMU_OWN inline T* emu_element(T* base, ulong stride, ulong2 origin, bool transposed, uint which) {
    const uint lane = emu_thread()->thread_index_in_simdgroup;
    ulong row = lane / 4, column = 2 * (lane % 4) + which;
    if (transposed) { const ulong kept = row; row = column, column = kept; }
    return base + (origin.y + row) * stride + origin.x + column;
}
template <typename T>
EMU_OWN inline void simdgroup_load(simdgroup_matrix<T, 8, 8>& into, const T* from, ulong stride = 8, ulong2 origin = 0,
                                   bool transposed = false, EMU_PLACE) {
    emu_meet("simdgroup_load", line, column, nullptr, 0);
    for (uint which = 0; which < 2; ++which) {
        const T* element = emu_element(from, stride, origin, transposed, which);
        emu_touch(element, sizeof(T), false);
        into.own[which] = *element;
    }
}
template <typename T>
EMU_OWN inline void simdgroup_store(simdgroup_matrix<T, 8, 8> from, T* into, ulong stride = 8, ulong2 origin = 0,
                                    bool transposed = false, EMU_PLACE) {
    emu_meet("simdgroup_store", line, column, nullptr, 0);
    for (uint which = 0; which < 2; ++which) {
        T* element = emu_element(into, stride, origin, transposed, which);
        emu_touch(element, sizeof(T), true);
        *element = from.own[which];
    }
}
template <typename D, typename A, typename B, typename C>
EMU_OWN inline void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                                                  const simdgroup_matrix<B, 8, 8>& b, const simdgroup_matrix<C, 8, 8>& c,
                                                  EMU_PLACE) {
    const float own[4] = {float(a.own[0]), float(a.own[1]), float(b.own[0]), float(b.own[1])};
    uint words[4];
    __builtin_memcpy(words, own, sizeof(words));
    const EmuBoard* board = emu_meet("simdgroup_multiply_accumulate", line, column, words, 4);
    const uint lane = emu_thread()->thread_index_in_simdgroup, row = lane / 4, first = 2 * (lane % 4);
    for (uint which = 0; which < 2; ++which) {
        const uint col = first + which;
        float sum = float(c.own[which]);
        for (uint k = 0; k < 8; ++k)
            sum += emu_bits<float>(board->words[row * 4 + k / 2][k % 2]) *
                   emu_bits<float>(board->words[k * 4 + col / 2][2 + col % 2]);
        d.own[which] = D(sum);
    }
}
template <typename D, typename A, typename B>
EMU_OWN inline void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                                       const simdgroup_matrix<B, 8, 8>& b, EMU_PLACE) {
    simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8, 8>(D(0.0f)), line, column);
}
}  // namespace metal
using namespace metal;
