// K6: one decode step of the gated short convolution for all rows, one thread a row and channel.
//
// Grid (D, R, 1), threadgroup (min(D, 256), 1, 1). With b, c, x the thirds of a row's projection: u = b * x rounded to T as it is
// kept; y = c * (sum over the TAPS - 1 kept ones and u, oldest first, each times its tap), in float, one rounding to T.
// The tail moves on by one; that of a row that is not active stays.
// Inputs: projected T [R, 3 * D]; tails T [R, TAPS - 1, D]; kernel_taps T [D, TAPS]; active bool [R].
// Template: typename T, int D, int TAPS.
// Outputs: mixed T [R, D]; new_tails T [R, TAPS - 1, D].
const uint channel = thread_position_in_grid.x, row = thread_position_in_grid.y;
const ulong from = ulong(row) * 3 * D + channel, tail = ulong(row) * (TAPS - 1) * D + channel;
const T fresh = static_cast<T>(float(projected[from]) * float(projected[from + 2 * D]));
float sum = 0.0f;
for (uint tap = 0; tap < uint(TAPS) - 1; ++tap) {
    sum += float(tails[tail + tap * D]) * float(kernel_taps[channel * TAPS + tap]);
}
sum += float(fresh) * float(kernel_taps[channel * TAPS + TAPS - 1]);
mixed[ulong(row) * D + channel] = static_cast<T>(float(projected[from + D]) * sum);
for (uint tap = 0; tap < uint(TAPS) - 1; ++tap) {
    T next = fresh;
    if (!active[row]) {
        next = tails[tail + tap * D];
    } else if (tap + 2 < uint(TAPS)) {
        next = tails[tail + (tap + 1) * D];
    }
    new_tails[tail + tap * D] = next;
}
