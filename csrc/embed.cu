// The row of the embedding table that belongs to a token: where a decode step begins.
//
//   h[i] = table[token, i]        table (vocab, hidden), token (1) int in the GPU's memory, h (hidden) float
//
// Launch:     a thread for each element of h.
//
// The kernel before this one chooses the token and advances the sequence's length. Kernels after this one read that
// length before their turn comes, so nobody may start until it is there: here, and only here, the launch of the next
// kernel waits too.

#include "sync.cuh"
#include "types.cuh"

template <typename T>
__global__ void embed(const T* table, const int* token, float* h, int vocab, int hidden) {
    wait_for_predecessor();
    launch_dependents();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= hidden) return;
    const int row = *token;
    const bool known = row >= 0 && row < vocab;  // an unknown one must show: NaN reaches every logit
    h[i] = known ? to_float(table[static_cast<size_t>(row) * hidden + i]) : __uint_as_float(0x7fffffffu);
}
