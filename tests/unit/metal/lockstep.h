// Runs the body of a Metal kernel that uses one simdgroup a threadgroup: 32 threads, simd operations as exchanges in
// lock step. For checking results on machines without Metal; it says nothing of speed. A lane that misses an exchange
// hangs the program, and the test's time limit finds it.
#pragma once
#include <barrier>
#include <cmath>
#include <cstdint>
#include <thread>
#include <vector>

using uint = std::uint32_t;
struct uint3 { uint x, y, z; };
namespace metal::precise { inline float exp(float x) { return std::exp(x); } }

inline std::barrier<>* lanes = nullptr;
inline float float_board[32];
inline uint uint_board[32];
thread_local uint own_lane = 0;

template <typename T, typename F> T exchange(T value, T* board, F combine) {
    board[own_lane] = value;
    lanes->arrive_and_wait();
    T found = board[0];
    for (int lane = 1; lane < 32; ++lane) found = combine(found, board[lane]);
    lanes->arrive_and_wait();
    return found;
}
inline float simd_max(float v) { return exchange(v, float_board, [](float a, float b) { return a > b ? a : b; }); }
inline float simd_sum(float v) { return exchange(v, float_board, [](float a, float b) { return a + b; }); }
inline uint simd_min(uint v) { return exchange(v, uint_board, [](uint a, uint b) { return a < b ? a : b; }); }

// Calls body(thread position in grid, thread position in threadgroup) for a grid of (32, rows, 1), threadgroup 32.
template <typename Body> void run_simdgroups(uint rows, Body body) {
    std::barrier<> barrier(32);
    lanes = &barrier;
    std::vector<std::thread> threads;
    for (uint lane = 0; lane < 32; ++lane) {
        threads.emplace_back([=] {
            own_lane = lane;
            for (uint row = 0; row < rows; ++row) body(uint3{lane, row, 0}, uint3{lane, 0, 0});
        });
    }
    for (auto& thread : threads) thread.join();
}
