// All layers of a decode step in one launch: the blocks stay, and the weights never stop coming.             lesson 06
//
//   for each layer:   qkv = W norm(h) + bias      attended = attention(rope(qkv), pages)    h += W attended
//                     act = swiglu(W norm(h))     h += W act * act_factor
//
//   layers (count) Layer; h (hidden), qkv float; attended, act half: what csrc/int4_ring.cu and
//   csrc/paged_attention_mma.cu call x, y, q and out, and the same bits. partial, lse, answers: as in the latter.
//   arrivals (BARRIERS, 32)  zero before and after
//
// Must move:  weights, scales, norms and biases of all layers, and their caches, once.
// Launch:     one block of THREADS for each multiprocessor at most: all must be there at once, since they wait for each
//             other. Dynamic shared memory: rings, sums, layers, x; see nanoqwen/kernels/decode_layers.py.
// Teaches:    what a launch costs is not its start but its end: rings that run dry.
//
// Between two kernels every ring runs empty, and it takes a microsecond until the next one's weights arrive. Here a
// stage that has been read is filled with the next chunk that its warp will want, be it of this product or of the next:
// while the blocks wait for each other the weights go on coming.
//
//     product    |      o      | wait |   gate_up ...
//     ring, in   | o  gate_up gate_up |            the ring is full when x of gate_up is there
//
// What the blocks of a launch wait for is the end of the launch before. Here they count: a block that has written its
// rows adds one, with release, and who wants the vector looks, with acquire, until all have. What is not in a ring and
// will be wanted soon, keys, values, norms and biases, is brought into the L2 cache meanwhile.

#include "attention_mma.cuh"
#include "int4_ring.cuh"
#include "sync.cuh"

constexpr int WARPS = ATTENTION_WARPS, THREADS = 32 * WARPS;
constexpr int MOST_STAGES = 8;
enum Product { QKV, O, GATE_UP, DOWN, PRODUCTS };
enum Barrier { ATTENDED = PRODUCTS, LEFT, BARRIERS };  // after those of the products
extern __shared__ __align__(128) unsigned char ring[];

struct Layer {
    const unsigned* words[PRODUCTS];
    const __half* scales[PRODUCTS];
    const __half* norms[2];  // before QKV, before GATE_UP
    const float* bias;       // of QKV
    __half* pages;
};

// A product, and the tiles of it that are this block's. Its items are the chunks of these tiles, the first chunk of all
// tiles, then the second: a warp has neighbouring ones, and keeps x of a chunk in registers.
struct Share {
    unsigned cols;
    int chunks, first_tile, tiles;

    __device__ __forceinline__ int first_item(int warp) const { return tiles * chunks * warp / WARPS; }
};

__device__ __forceinline__ void wait_for(const unsigned* arrivals, unsigned wanted) {
    if (threadIdx.x == 0) {
        while (ld_acquire(arrivals) < wanted) {
        }
    }
}

struct AfterQkv {  // attention's turn
    static constexpr int ANSWERS_AHEAD = 12;
    const unsigned* arrivals;
    unsigned wanted;

    __device__ __forceinline__ void wait() const {
        wait_for(arrivals, wanted);
        __syncthreads();
    }
    __device__ __forceinline__ void has_query() const {}
    __device__ __forceinline__ void sync() const { __syncthreads(); }
};

template <int GROUP, int HEAD_DIM>
__global__ void __launch_bounds__(THREADS, 1)
    decode_layers(const Layer* layers, float* h, float* qkv, __half* attended, __half* act, const float* cos,
                  const float* sin, const int* table, const int* length, uint2* partial, float* lse, unsigned* answers,
                  unsigned* arrivals, int count, unsigned hidden, int group, int kv_heads, unsigned inner, int splits,
                  int max_pages, int positions, int stages, unsigned sum_bytes, float eps, float scale_log2,
                  float act_factor, float act_shrink) {
    constexpr int STAGE_BYTES = Stage<GROUP, false>::BYTES;
    __shared__ mbarrier_t full[WARPS][MOST_STAGES];
    __shared__ Share shares[PRODUCTS];
    __shared__ float squares[NORM_COLS / 256];

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const unsigned q_size = group * kv_heads * HEAD_DIM, widest = max(max(hidden, q_size), inner);
    const int ring_bytes = WARPS * stages * STAGE_BYTES;
    float* sums = reinterpret_cast<float*>(ring + ring_bytes);  // [tiles][chunks][16]
    Layer* here = reinterpret_cast<Layer*>(ring + ring_bytes + sum_bytes);
    unsigned char* room = reinterpret_cast<unsigned char*>(here + count);  // of x, and of attention when x is done with
    SplitGroup* x_groups = reinterpret_cast<SplitGroup*>(room);
    unsigned char* x_bytes = room + (widest / GROUP + 1) / 2 * 16;

    if (threadIdx.x < PRODUCTS) {
        const int which = threadIdx.x;
        const unsigned cols = which == O ? q_size : which == DOWN ? inner : hidden;
        const unsigned rows = which == QKV ? q_size + 2 * kv_heads * HEAD_DIM : which == GATE_UP ? 2 * inner : hidden;
        const int unit = which == GATE_UP ? 2 : 1;  // tiles that stay together
        const long long units = rows / (16 * unit);
        const int first = units * blockIdx.x / gridDim.x, end = units * (blockIdx.x + 1) / gridDim.x;
        shares[which] = {cols, static_cast<int>((cols + RING_CHUNK - 1) / RING_CHUNK), first * unit,
                         (end - first) * unit};
    }
    for (int i = threadIdx.x; i < count * static_cast<int>(sizeof(Layer) / 8); i += THREADS) {
        reinterpret_cast<uint2*>(here)[i] = reinterpret_cast<const uint2*>(layers)[i];
    }
    if (threadIdx.x < WARPS * MOST_STAGES) {
        mbarrier_init(&full[0][0] + threadIdx.x, 1);
        mbarrier_init_fence();
    }
    __syncthreads();

    int ahead = -1, next_item = 0, next_end = 0, next_chunk = 0, next_tile = 0;  // what a stage will be filled with
    const auto fill = [&](int stage) {
        while (next_item == next_end) {
            if (ahead + 1 >= count * PRODUCTS) return;
            const Share share = shares[++ahead % PRODUCTS];
            next_item = share.first_item(warp);
            next_end = share.first_item(warp + 1);
            next_chunk = next_item / max(share.tiles, 1);
            next_tile = next_item % max(share.tiles, 1);
        }
        const int which = ahead % PRODUCTS;
        const Share share = shares[which];
        const Layer& layer = here[ahead / PRODUCTS];
        fill_stage<GROUP, false>(ring + (warp * stages + stage) * STAGE_BYTES, &full[warp][stage], layer.words[which],
                                 layer.scales[which], nullptr, share.first_tile + next_tile, next_chunk * RING_CHUNK,
                                 share.cols);
        ++next_item;
        if (++next_tile == share.tiles) {
            next_tile = 0;
            ++next_chunk;
        }
    };
    if (lane == 0) {
        for (int stage = 0; stage < stages; ++stage) fill(stage);
    }
    __syncwarp();

    Attention<__half> attention = {nullptr, qkv, cos, sin, nullptr, table, length, attended, partial, lse, answers,
                                   scale_log2, 1, group, max_pages, positions};
    const Split split =
        find_split<HEAD_DIM, true>(attention, blockIdx.x % splits, splits, blockIdx.x / splits, kv_heads);
    const bool attends = split.kv_head < kv_heads && split.index < split.live();
    const int page = (split.index + lane * splits) * WARPS + warp;  // that the lane will bring into the L2 cache
    const int number = attends && page < ceil_div(split.tokens, PAGE_SIZE) ? table[page] : -1;

    const unsigned char* const x_lane = x_bytes + g % 2 * 64 + t * 16;
    const auto all = [&](int barrier, int layer, int each) {  // wait until `each` have arrived for each layer so far
        wait_for(arrivals + 32 * barrier, (layer + 1) * each);
        __syncthreads();
    };
    int stage = 0, parity = 0;
#pragma unroll 1
    for (int product = 0; product < count * PRODUCTS; ++product) {
        const int which = product % PRODUCTS, layer = product / PRODUCTS;
        const Layer& of = here[layer];
        const Share share = shares[which];

        if (which == O) {
            if (attends) {
                attention.pages = of.pages;
                auto& shared = *reinterpret_cast<AttentionShared<HEAD_DIM>*>(room);
                const AfterQkv turn = {arrivals + 32 * QKV, (layer + 1) * gridDim.x};
                if (attend<__half, HEAD_DIM, true>(attention, split, shared, turn)) {
                    __syncthreads();
                    if (threadIdx.x == 0) red_add_release(arrivals + 32 * ATTENDED, 1u);
                }
            }
        }
        if (which == QKV && number >= 0) {
            bulk_prefetch(kv_page<HEAD_DIM>(of.pages, number, split.kv_head, kv_heads), 2 * PAGE_SIZE * HEAD_DIM * 2);
        }
        if (blockIdx.x == 0 && threadIdx.x == 0) {
            if (which == QKV) {
                bulk_prefetch(of.norms[1], hidden * 2);
                if (max_pages >= 4) bulk_prefetch(table, max_pages / 4 * 16);
            }
            if (which == DOWN && layer + 1 < count) {
                bulk_prefetch(here[layer + 1].norms[0], hidden * 2);
                bulk_prefetch(here[layer + 1].bias, (q_size + 2 * kv_heads * HEAD_DIM) * 4);
            }
        }

        float factor = which == DOWN ? act_factor : 1.0f;
        const Octets<WARPS> octets(share.cols / 8);
        if (which == QKV || which == GATE_UP) {
            const __half* norm = of.norms[which / 2];
            uint4 early[2];  // on their way before h is there
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if (octets.octet(i) < octets.count) early[i] = load_pack(norm + octets.octet(i) * 8).bits;
            }
            if (product == 0) wait_for_predecessor();
            else if (which == QKV) all(DOWN, layer - 1, gridDim.x);
            else all(O, layer, gridDim.x);
            const auto weights = [&](int i, int octet) {
                return i == 0 ? early[0] : i == 1 ? early[1] : load_pack(norm + octet * 8).bits;
            };
            split_normed<GROUP, false>(octets, h, weights, x_bytes, x_groups, squares);
        } else {
            if (which == O) all(ATTENDED, layer, kv_heads);
            else all(GATE_UP, layer, gridDim.x);
            split_halves<GROUP, false, 5>(octets, which == O ? attended : act, x_bytes, x_groups);
        }
        // What is added to a row in the end is asked for long before.
        const int rows = share.tiles * 16, first_row = share.first_tile * 16;
        const float* added = which == QKV ? of.bias : h;
        const float row_early = which != GATE_UP && threadIdx.x < rows ? added[first_row + threadIdx.x] : 0.0f;
        __syncthreads();
        if (which == QKV || which == GATE_UP) factor = norm_factor(squares, octets.pieces, hidden, eps);
        if (product == count * PRODUCTS - 1) launch_dependents();

        const int chunks = share.chunks, end = share.first_item(warp + 1);
        int item = share.first_item(warp), chunk = item / max(share.tiles, 1), tile = item % max(share.tiles, 1);
        uint4 held[RING_CHUNK / 64];
        float held_scale[RING_CHUNK / GROUP];
        for (bool is_new = true; item < end; ++item) {
            const unsigned from = chunk * RING_CHUNK;
            const unsigned char* in_ring = ring + (warp * stages + stage) * STAGE_BYTES;
            float sum[1][2] = {};
            const auto x_at = [&](int i, int) { return *reinterpret_cast<const uint4*>(x_lane + (from + i * 64) * 2); };
            const auto has_read = [&] {
                __syncwarp();  // all lanes have
                if (lane == 0) fill(stage);
            };
            if (share.cols - from >= RING_CHUNK) {
                if (is_new) {
#pragma unroll
                    for (int i = 0; i < RING_CHUNK / 64; ++i) held[i] = x_at(i, 0);
#pragma unroll
                    for (int i = 0; i < RING_CHUNK / GROUP; ++i) held_scale[i] = x_groups[from / GROUP + i].scale;
                }
                mbarrier_wait(&full[warp][stage], parity);
                multiply_stage<GROUP, false>(in_ring, [&](int i, int) { return held[i]; },
                                             [&](int i, int) { return SplitGroup{held_scale[i], 0}; }, sum, has_read);
            } else {
                mbarrier_wait(&full[warp][stage], parity);
                multiply_part<GROUP, false>(in_ring, share.cols - from, x_at,
                                            [&](int i, int) { return x_groups[from / GROUP + i]; }, sum);
                has_read();
            }
            if (++stage == stages) {
                stage = 0;
                parity ^= 1;
            }
            if (t == 0) {
                float* to = sums + (tile * chunks + chunk) * 16;
                to[g] = sum[0][0];
                to[g + 8] = sum[0][1];
            }
            is_new = ++tile == share.tiles;
            if (is_new) {
                tile = 0;
                ++chunk;
            }
        }
        __syncthreads();

        const auto total = [&](int row) {
            return add_chunks(sums + row / 16 * chunks * 16 + row % 16, chunks, 16) * factor;
        };
        if (which == GATE_UP) {
            for (int i = threadIdx.x; i < rows / 2; i += THREADS) {
                const int row = i / 16 * 32 + i % 16;
                const float gate = total(row), up = total(row + 16);
                act[first_row / 2 + i] = __float2half_rn(gate / (1.0f + expf(-gate)) * up * act_shrink);
            }
        } else {
            float* y = which == QKV ? qkv : h;
            for (int i = threadIdx.x; i < rows; i += THREADS) {
                y[first_row + i] = total(i) + (i == threadIdx.x ? row_early : added[first_row + i]);
            }
        }
        __syncthreads();
        if (threadIdx.x == 0) red_add_release(arrivals + 32 * which, 1u);
    }
    // Nobody waits any more when the last block leaves.
    if (threadIdx.x == 0 && atomic_add_acq_rel(arrivals + 32 * LEFT, 1u) == gridDim.x - 1) {
        for (int barrier = 0; barrier < BARRIERS; ++barrier) arrivals[32 * barrier] = 0u;
    }
}
