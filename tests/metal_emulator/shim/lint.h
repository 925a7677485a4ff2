// As msl.h, for a compiler that only parses: address spaces are real here, so that a pointer without `device`, a mix of
// device and threadgroup memory, a store to an input and a name or word that Metal does not have are errors.
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
typedef __bf16 bfloat;
typedef _Float16 half;
typedef bfloat bfloat16_t;
typedef half float16_t;
#define EMU_VECTORS(T)                                  \
    typedef T T##2 __attribute__((ext_vector_type(2))); \
    typedef T T##3 __attribute__((ext_vector_type(3))); \
    typedef T T##4 __attribute__((ext_vector_type(4)));
EMU_VECTORS(float)
EMU_VECTORS(uint)
EMU_VECTORS(int)
EMU_VECTORS(ulong)
#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define thread
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define FLT_MAX __FLT_MAX__
#define MAXFLOAT __FLT_MAX__
template <typename To, typename From> To as_type(From from);
namespace metal {
enum class mem_flags { mem_none, mem_device, mem_threadgroup };
template <typename T> T min(T, T);
template <typename T> T max(T, T);
template <typename T> T clamp(T, T, T);
template <typename T> T select(T, T, bool);
float exp(float), exp2(float), log(float), log2(float), sqrt(float), rsqrt(float), abs(float), fabs(float);
bool isnan(float), isinf(float);
uint popcount(uint), ctz(uint), clz(uint);
float dot(float4, float4);
namespace precise { using metal::exp; using metal::exp2; using metal::log; using metal::log2; using metal::sqrt; using metal::rsqrt; }
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);
template <typename T> T simd_sum(T);
template <typename T> T simd_product(T);
template <typename T> T simd_min(T);
template <typename T> T simd_max(T);
template <typename T> T simd_and(T);
template <typename T> T simd_or(T);
template <typename T> T simd_xor(T);
template <typename T> T simd_prefix_exclusive_sum(T);
template <typename T> T simd_prefix_inclusive_sum(T);
template <typename T> T simd_shuffle(T, ushort);
template <typename T> T simd_shuffle_xor(T, ushort);
template <typename T> T simd_shuffle_down(T, ushort);
template <typename T> T simd_shuffle_up(T, ushort);
template <typename T> T simd_broadcast(T, ushort);
template <typename T> T simd_broadcast_first(T);
struct simd_vote { explicit operator ulong() const; };
simd_vote simd_ballot(bool);
bool simd_any(bool);
bool simd_all(bool);
bool simd_is_first();
template <typename T, int ROWS, int COLUMNS> struct simdgroup_matrix {
    simdgroup_matrix() = default;
    explicit simdgroup_matrix(T);
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
template <typename T, int R, int C> simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T);
template <typename T> void simdgroup_load(simdgroup_matrix<T, 8, 8>&, const device T*, ulong = 8, ulong2 = 0, bool = false);
template <typename T> void simdgroup_load(simdgroup_matrix<T, 8, 8>&, const threadgroup T*, ulong = 8, ulong2 = 0, bool = false);
template <typename T> void simdgroup_store(simdgroup_matrix<T, 8, 8>, device T*, ulong = 8, ulong2 = 0, bool = false);
template <typename T> void simdgroup_store(simdgroup_matrix<T, 8, 8>, threadgroup T*, ulong = 8, ulong2 = 0, bool = false);
template <typename D, typename A, typename B, typename C>
void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>&, const simdgroup_matrix<A, 8, 8>&,
                                   const simdgroup_matrix<B, 8, 8>&, const simdgroup_matrix<C, 8, 8>&);
template <typename D, typename A, typename B>
void simdgroup_multiply(simdgroup_matrix<D, 8, 8>&, const simdgroup_matrix<A, 8, 8>&, const simdgroup_matrix<B, 8, 8>&);
}  // namespace metal
using namespace metal;
#pragma GCC poison double goto
