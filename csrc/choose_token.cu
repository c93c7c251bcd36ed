// From logits to the next token, without asking the host: the largest, or a draw from those that top-k and top-p leave.
//
//   logits (at least vocab) float; token, length (1) int; history (history_size) int, or null
//
//   choose_token   LARGEST  search[TOP] becomes the largest logit
//                  GREEDY   token is the first of the largest logits
//                  DRAWN    token i with the probability exp(logits[i] / temperature) / sum, over logits of at least
//                           search[FLOOR]
//   find_digit     one digit of the floor, the leading one first: of the logit that is number top_k from the top, or
//                  (MASS) of the one at which the probabilities of all above it and its own reach top_p of the sum
//
// GREEDY and DRAWN end the step: history[length] = token, length + 1. A NaN among the logits makes the token -1.
//
// Launch:     at most 1024 blocks of 1024 threads. The last to arrive ends the work of all. `bins` and `arrivals` are
//             zero before and after.
// Sums:       whole numbers, so they do not depend on who comes first: a probability counts in 2^-44 of the largest.
//
// A float's bits in the right order are a whole number, its key. The search is radix selection: a pass over all logits
// counts what their keys have as next digit, and adds up from the top until what is wanted is reached. To draw from
// probabilities without adding them up, add noise to each logit and take the largest: the Gumbel-max trick.

#include "sync.cuh"

using u64 = unsigned long long;
constexpr int THREADS = 1024, DIGITS = 2048;  // 11 bits, 11 bits, and the last 10
constexpr unsigned NAN_KEY = 0xffffffffu;     // above that of infinity
enum Choice { LARGEST, GREEDY, DRAWN };
enum Search { TOP, FLOOR, PREFIX, LEFT };

__device__ __forceinline__ unsigned key_of(float v) {
    if (v != v) return NAN_KEY;
    const unsigned bits = v == 0.0f ? 0u : __float_as_uint(v);  // -0 equals 0
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float value_of(unsigned key) {
    return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}

// 32 random bits for each counter. Philox4x32-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.
__device__ __forceinline__ unsigned philox(u64 seed, unsigned index, unsigned position) {
    unsigned x0 = index, x1 = position, x2 = 0, x3 = 0, k0 = seed, k1 = seed >> 32;
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const unsigned high0 = __umulhi(0xD2511F53u, x0), low0 = 0xD2511F53u * x0;
        const unsigned high1 = __umulhi(0xCD9E8D57u, x2), low1 = 0xCD9E8D57u * x2;
        x0 = high1 ^ x1 ^ k0, x1 = low1, x2 = high0 ^ x3 ^ k1, x3 = low0;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return x0;
}
// -log(-log(u)), u uniform; precise where the result is large, which is where it decides.
__device__ __forceinline__ float gumbel(unsigned bits) {
    const float u = fminf(fmaf(static_cast<float>(bits), 0x1p-32f, 0x1p-33f), 1.0f - 0x1p-24f);
    return -logf(-log1pf(-u));
}

// The largest of the block's values; only warp 0 has it.
__device__ __forceinline__ u64 block_max(u64 value, u64* of_warps) {
    const auto warp_largest = [](u64 v) {
#pragma unroll
        for (int d = 16; d > 0; d /= 2) v = max(v, __shfl_xor_sync(0xffffffffu, v, d));
        return v;
    };
    value = warp_largest(value);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
    __syncthreads();
    return threadIdx.x < 32 ? warp_largest(of_warps[threadIdx.x]) : 0;
}

// Whether this block is the last to come; what the others wrote is then visible to all its threads.
__device__ __forceinline__ bool arrives_last(unsigned* arrivals) {
    __shared__ bool is_last;
    __syncthreads();
    if (threadIdx.x == 0) {
        is_last = atomic_add_acq_rel(arrivals, 1u) == gridDim.x - 1;
        if (is_last) *arrivals = 0u;  // for the next launch
    }
    __syncthreads();
    return is_last;
}

template <Choice CHOICE>
__global__ void __launch_bounds__(THREADS)
    choose_token(const float* logits, u64* best, unsigned* arrivals, u64* search, int* token, int* length, int* history,
                 int vocab, int history_size, int floored, float temperature, long long seed) {
    __shared__ u64 of_warps[2][THREADS / 32];
    launch_dependents();
    wait_for_predecessor();
    const unsigned floor = CHOICE == DRAWN && floored ? search[FLOOR] : 0u;
    const unsigned position = CHOICE == DRAWN ? *length : 0;
    u64 mine = 0;
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < vocab; i += gridDim.x * THREADS) {
        unsigned key = key_of(logits[i]);
        if constexpr (CHOICE == DRAWN) {
            if (key < floor) continue;
            key = key_of(logits[i] / temperature + gumbel(philox(seed, i, position)));
        }
        mine = max(mine, static_cast<u64>(key) << 32 | ~static_cast<unsigned>(i));  // of equals the first
    }
    mine = block_max(mine, of_warps[0]);
    if (threadIdx.x == 0) best[blockIdx.x] = mine;
    if (!arrives_last(arrivals)) return;

    mine = block_max(threadIdx.x < gridDim.x ? best[threadIdx.x] : 0, of_warps[1]);
    if (threadIdx.x > 0) return;
    if constexpr (CHOICE == LARGEST) {
        search[TOP] = mine >> 32;
        return;
    }
    const int chosen = mine >> 32 == NAN_KEY ? -1 : static_cast<int>(~static_cast<unsigned>(mine)), at = *length;
    *token = chosen;
    if (at >= 0 && at < history_size) history[at] = chosen;
    *length = at + 1;
}

template <bool MASS>
__global__ void __launch_bounds__(THREADS)
    find_digit(const float* logits, u64* bins, unsigned* arrivals, u64* search, int vocab, int shift, int floored,
               float temperature, int top_k, float top_p) {
    __shared__ unsigned low[DIGITS], high[DIGITS];  // words of the sums: additions of 64 bits would be loops here
    __shared__ u64 of_warps[THREADS / 32];
    const int digit_bits = shift == 0 ? 10 : 11, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const bool first = shift + digit_bits == 32;
    launch_dependents();
    for (int i = threadIdx.x; i < DIGITS; i += THREADS) low[i] = high[i] = 0;
    __syncthreads();
    wait_for_predecessor();

    const unsigned floor = floored ? search[FLOOR] : 0u;
    const u64 prefix = first ? 0 : search[PREFIX], left = first ? 0 : search[LEFT];
    const float top = MASS ? value_of(search[TOP]) : 0.0f;
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < vocab; i += gridDim.x * THREADS) {
        const float v = logits[i];
        const u64 key = key_of(v);
        if (key < floor || key >> (shift + digit_bits) != prefix) continue;
        u64 weight = 1;
        if (MASS) {  // infinities that equal the largest are as likely as each other; NaN weighs nothing
            const float below = v == top ? 0.0f : (v - top) / temperature;
            weight = below <= 0.0f ? static_cast<u64>(expf(below) * 0x1p44f) : 0;
        }
        if (weight == 0) continue;
        const unsigned digit = key >> shift & ((1 << digit_bits) - 1), added = weight;
        const unsigned before = atomicAdd(&low[digit], added);
        if (MASS) atomicAdd(&high[digit], static_cast<unsigned>(weight >> 32) + (before + added < before));
    }
    __syncthreads();
    for (int i = threadIdx.x; i < DIGITS; i += THREADS) {
        const u64 sum = static_cast<u64>(high[i]) << 32 | low[i];
        if (sum > 0) atomicAdd(&bins[i], sum);
    }
    if (!arrives_last(arrivals)) return;

    const int digit = DIGITS - 1 - 2 * threadIdx.x;  // and the one below it: from the top down
    const u64 upper = bins[digit], both = upper + bins[digit - 1];
    bins[digit] = bins[digit - 1] = 0;
    u64 sum = both;  // of this thread and those before it
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const u64 other = __shfl_up_sync(0xffffffffu, sum, d);
        if (lane >= d) sum += other;
    }
    if (lane == 31) of_warps[warp] = sum;
    __syncthreads();
    u64 total = 0;
    for (int i = 0; i < THREADS / 32; ++i) {
        if (i < warp) sum += of_warps[i];
        total += of_warps[i];
    }
    u64 wanted = left;
    if (first && MASS) wanted = max(static_cast<u64>(ceil(static_cast<double>(top_p) * total)), u64(1));
    if (first && !MASS) wanted = min(static_cast<u64>(top_k), total);
    const u64 above = sum - both;
    if (above < wanted && wanted <= sum) {  // one thread
        const bool is_upper = wanted <= above + upper;
        const u64 found = prefix << digit_bits | (is_upper ? digit : digit - 1);
        search[PREFIX] = found;
        search[LEFT] = wanted - above - (is_upper ? 0 : upper);
        if (shift == 0) search[FLOOR] = found;
    }
}
