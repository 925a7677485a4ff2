// K6: one step of the gated short convolution, one token a row, one thread a row and channel.
//
// Grid (D, R, 1), threadgroup (256, 128, 64 or 32, 1, 1), a divisor of D. With b, c, x the thirds of a row's projection:
// u = b * x; y = c * (sum over the TAPS - 1 kept ones and u, oldest first, each times its tap); the tail moves on by one.
// Every product and sum is rounded to T in a statement of its own, so that none is fused, as MLX's own operations do it:
// tokens that are fed several at a time go through those, and must come out the same.
// Inputs: projected T [R, 3 * D]; tails T [R, TAPS - 1, D]; kernel_taps [D, TAPS, 1], of any float type where T is float.
// Template: typename T, int D, int TAPS.
// Outputs: mixed T [R, D]; new_tails T [R, TAPS - 1, D].
const uint channel = thread_position_in_grid.x, row = thread_position_in_grid.y;
const ulong from = ulong(row) * 3 * D + channel, tail = ulong(row) * (TAPS - 1) * D + channel;
const T fresh = static_cast<T>(float(projected[from]) * float(projected[from + 2 * D]));
T sum = static_cast<T>(0.0f);
for (uint tap = 0; tap < uint(TAPS); ++tap) {
    T kept = fresh;
    if (tap + 1 < uint(TAPS)) {
        kept = tails[tail + tap * D];
    }
    if (tap > 0) {
        new_tails[tail + (tap - 1) * D] = kept;
    }
    const T product = static_cast<T>(float(kept) * float(kernel_taps[channel * TAPS + tap]));
    sum = tap == 0 ? product : static_cast<T>(float(sum) + float(product));
}
mixed[ulong(row) * D + channel] = static_cast<T>(float(projected[from + D]) * float(sum));
