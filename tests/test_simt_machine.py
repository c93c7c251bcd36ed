"""The SIMT machine runs CUDA source as a GPU does: same results, same counts, and a clear word where it cannot go on."""

import ctypes
from fractions import Fraction

import numpy as np
import pytest
import torch

from nanoqwen import simt

GEMV = r"""
#include "types.cuh"
#include "warp.cuh"

// One thread a row.
template <typename T>
__global__ void gemv_naive(const T* __restrict__ w, const T* __restrict__ x, float* y, int rows, int cols) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    float sum = 0;
    for (int i = 0; i < cols; ++i) sum = fmaf(to_float(w[row * cols + i]), to_float(x[i]), sum);
    y[row] = sum;
}

// One warp a row, 16 bytes a load.
extern "C" __global__ void gemv_warp(const float* w, const float* x, float* y, int rows, int cols) {
    int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    const float4* w4 = reinterpret_cast<const float4*>(w + row * cols);
    const float4* x4 = reinterpret_cast<const float4*>(x);
    float sum = 0;
    for (int i = lane; i < cols / 4; i += 32) {
        float4 a = w4[i], b = x4[i];
        sum = fmaf(a.x, b.x, sum);
        sum = fmaf(a.y, b.y, sum);
        sum = fmaf(a.z, b.z, sum);
        sum = fmaf(a.w, b.w, sum);
    }
    sum = warp_sum(sum);
    if (lane == 0) y[row] = sum;
}
"""
NAIVE = {torch.float32: "gemv_naive<float>", torch.float16: "gemv_naive<half>", torch.bfloat16: "gemv_naive<nv_bfloat16>"}


@pytest.fixture(scope="module")
def gemv():
    return simt.compile(GEMV, [*NAIVE.values(), "gemv_warp"], filename="gemv.cu")


def problem(rows, cols, dtype=torch.float32):
    make = torch.Generator().manual_seed(rows * 7919 + cols)
    w, x = (torch.randn(s, generator=make).to(dtype) for s in ((rows, cols), (cols,)))
    return w, x, torch.full((rows,), float("nan")), w.double() @ x.double()


@pytest.mark.parametrize("rows,cols", [(1, 128), (7, 384), (129, 256)])
@pytest.mark.parametrize("dtype", NAIVE)
def test_a_gemv_is_right_and_both_builds_agree_bit_for_bit(gemv, dtype, rows, cols):
    w, x, y, expected = problem(rows, cols, dtype)
    launches = [(NAIVE[dtype], (rows + 31) // 32, 32)]
    if dtype == torch.float32:
        launches.append(("gemv_warp", (rows + 3) // 4, 128))
    for kernel, grid, block in launches:
        gemv[kernel].launch(grid, block, (w, x, y, rows, cols))
        assert (y - expected).norm() <= 1e-5 * expected.norm()
        observed = torch.full_like(y, float("nan"))
        report = simt.observe(gemv[kernel].launch, grid, block, (w, x, observed, rows, cols), outputs=["y"])
        assert report.clean, str(report)
        assert torch.equal(y, observed)


def test_counts_equal_those_that_ncu_measured_on_an_h200(gemv):
    w, x, y, _ = problem(256, 256)
    naive = simt.observe(gemv["gemv_naive<float>"].launch, 2, 128, (w, x, y, 256, 256)).totals
    assert (naive.global_load_requests, naive.global_load_sectors) == (4096, 67584)
    warp = simt.observe(gemv["gemv_warp"].launch, 32, 256, (w, x, y, 256, 256)).totals
    assert (warp.global_load_requests, warp.global_load_sectors) == (1024, 16384)


def test_lines_tell_the_tensors_apart_and_pictures_keep_the_lanes(gemv):
    w, x, y, _ = problem(256, 256)
    report = simt.observe(gemv["gemv_naive<float>"].launch, 2, 128, (w, x, y, 256, 256))
    loads = {entry.buffers: entry for entry in report.lines if entry.how == "load"}
    assert loads["w",].per_request == 32 and loads["x",].per_request == 1
    line = next(i for i, row in enumerate(GEMV.splitlines(), 1) if "to_float(w[row" in row)
    assert loads["w",].line == line and "to_float(w[row" in loads["w",].source
    picture = loads["w",].pictures[0]
    assert picture.offsets[5] - picture.offsets[4] == 1024 and len(picture.sectors) == 32
    assert "simulated" in report._repr_html_() and "simulated" in str(report)


def test_the_plot_is_drawn_and_says_that_it_is_simulated(gemv):
    pytest.importorskip("matplotlib").use("Agg")
    w, x, y, _ = problem(64, 128)
    report = simt.observe(gemv["gemv_warp"].launch, 8, 256, (w, x, y, 64, 128))
    figure = report.plot()
    assert figure.get_suptitle().startswith("simulated")
    with pytest.raises(ValueError, match="line 1"):
        report.plot(line=1)


def test_observe_runs_any_function_that_launches(gemv):
    def product(w, x):
        y = torch.empty(w.shape[0])
        gemv["gemv_warp"].launch(w.shape[0], 32, (w, x, y, *w.shape), outputs=["y"])
        return y

    w, x, _, expected = problem(8, 128)
    report = simt.observe(product, w, x)
    torch.testing.assert_close(report.result.double(), expected, rtol=1e-5, atol=1e-5)
    assert report.totals.launches == 1 and report.clean
    with simt.observing(seed=5) as both:
        product(w, x)
        product(w, x)
    assert both.totals.launches == 2 and both.totals.global_load_requests == 2 * report.totals.global_load_requests


WORDS = r"""
#include "async_copy.cuh"
#include "bits.cuh"
#include "mbarrier.cuh"
#include "mma.cuh"
#include "sync.cuh"
#include "types.cuh"
#include "warp.cuh"

extern "C" __global__ void warp_words(const int* in, unsigned* out) {
    int lane = threadIdx.x, v = in[lane];
    unsigned* o = out + lane * 16;
    o[0] = __shfl_sync(0xffffffffu, v, 3, 8);
    o[1] = __shfl_up_sync(0xffffffffu, v, 2u, 16);
    o[2] = __shfl_down_sync(0xffffffffu, v, 5u);
    o[3] = __shfl_xor_sync(0xffffffffu, v, 9);
    o[4] = __ballot_sync(0xffffffffu, v > 0);
    o[5] = __any_sync(0xffffffffu, v == in[7]) + 2 * __all_sync(0xffffffffu, v == in[7]);
    o[6] = __match_any_sync(0xffffffffu, v & 3);
    o[7] = __reduce_add_sync(0xffffffffu, v);
    o[8] = __reduce_min_sync(0xffffffffu, v);
    o[9] = __reduce_max_sync(0xffffffffu, (unsigned)v);
    o[10] = __activemask();
    if (lane < 16) o[11] = __shfl_xor_sync(0x0000ffffu, v, 1);
    else o[11] = __shfl_xor_sync(0xffff0000u, v, 2);
    o[12] = (unsigned)(__shfl_xor_sync(0xffffffffu, (long long)v << 20, 1) >> 20);
    o[13] = (unsigned)__shfl_xor_sync(0xffffffffu, (double)v, 1);
    o[14] = (unsigned)warp_sum(v);
    o[15] = __syncthreads_count(v > 0);
}

extern "C" __global__ void bit_words(const unsigned* in, unsigned* out) {
    unsigned a = in[3 * threadIdx.x], b = in[3 * threadIdx.x + 1], c = in[3 * threadIdx.x + 2];
    unsigned* o = out + threadIdx.x * 12;
    o[0] = __byte_perm(a, b, c & 0x7777);
    o[1] = __funnelshift_l(a, b, c);
    o[2] = __funnelshift_r(a, b, c);
    o[3] = __dp4a((int)a, (int)b, (int)c);
    o[4] = __dp4a(a, b, c);
    o[5] = lop3<0xe2>(a, b, c);
    o[6] = __popc(a) + 100 * __clz(a >> 9) + 10000 * __ffs(a << 3);
    o[7] = __brev(a);
    o[8] = __umulhi(a, b);
    o[9] = min(a, b) ^ max((int)a, (int)b);
    o[10] = prmt(a, b, 0x5410);
    o[11] = __float_as_uint(__uint_as_float(a));
}

extern "C" __global__ void halves(const unsigned short* in, float* as_half, float* as_bf16, unsigned short* back) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    as_half[i] = __half2float(__ushort_as_half(in[i]));
    as_bf16[i] = __bfloat162float(__ushort_as_bfloat16(in[i]));
    back[2 * i] = __half_as_ushort(__float2half_rn(as_half[i]));
    back[2 * i + 1] = __bfloat16_as_ushort(__float2bfloat16_rn(as_bf16[i]));
}

extern "C" __global__ void rounded(const float* in, unsigned short* half_out, unsigned short* bf16_out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    half_out[i] = __half_as_ushort(__float2half_rn(in[i]));
    bf16_out[i] = __bfloat16_as_ushort(__float2bfloat16_rn(in[i]));
}

extern "C" __global__ void half_fma(const half2* a, const half2* b, const half2* c, half2* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = __hfma2(a[i], b[i], c[i]);
}

extern "C" __global__ void atomics(int* i, unsigned* u, float* f, half2* h) {
    atomicAdd(&i[0], -1);
    atomicMin(&i[1], -(int)threadIdx.x);
    atomicMax(&i[2], (int)threadIdx.x - 1000);
    atomicAdd(&u[0], 1u);
    atomicOr(&u[1], 1u << (threadIdx.x & 31));
    atomicCAS(&u[2], 0u, 7u);
    atomicExch(&u[3], 9u);
    atomicAdd(&f[0], 0.5f);
    atomicAdd(h, __floats2half2_rn(1.0f, 2.0f));
}

// a: 16 x 16 and b: 16 x 8, both row by row; d: 16 x 8.
template <typename T> __global__ void multiply(const T* a, const T* b, float* d) {
    __shared__ alignas(16) T tile[16][16];
    for (int i = threadIdx.x; i < 256; i += 32) tile[i / 16][i % 16] = a[i];
    __syncwarp();
    int lane = threadIdx.x, g = lane / 4, t = lane % 4;
    unsigned fa[4], fb[2], bits;
    // Tiles in the order of the registers: rows 0-7 and 8-15 of columns 0-7, then of columns 8-15.
    ldmatrix_x4(fa, &tile[lane % 16][8 * (lane / 16)]);
    for (int i = 0; i < 2; ++i) {
        T pair[2] = {b[(2 * t + 8 * i) * 8 + g], b[(2 * t + 1 + 8 * i) * 8 + g]};
        memcpy(&bits, pair, 4);
        fb[i] = bits;
    }
    float acc[4] = {0, 0, 0, 0};
    if (sizeof(T) == 2 && T(1.0f) == __half2float(__ushort_as_half(0x3c00))) {}
    multiply_tile(acc, fa, fb, T());
    d[g * 8 + 2 * t] = acc[0];
    d[g * 8 + 2 * t + 1] = acc[1];
    d[(g + 8) * 8 + 2 * t] = acc[2];
    d[(g + 8) * 8 + 2 * t + 1] = acc[3];
}

extern "C" __global__ void transposed(const unsigned short* in, unsigned short* out) {
    __shared__ alignas(16) unsigned short tile[32][8];
    for (int i = threadIdx.x; i < 256; i += 32) tile[i / 8][i % 8] = in[i];
    __syncwarp();
    unsigned r[4];
    ldmatrix_x4_transposed(r, &tile[threadIdx.x][0]);
    for (int j = 0; j < 4; ++j) {
        out[j * 64 + (threadIdx.x / 4) * 8 + 2 * (threadIdx.x % 4)] = r[j] & 0xffff;
        out[j * 64 + (threadIdx.x / 4) * 8 + 2 * (threadIdx.x % 4) + 1] = r[j] >> 16;
    }
}

// A ring of two tiles, filled by cp.async one step ahead.
template <bool wait> __global__ void ring(const float* in, float* out, int tiles) {
    __shared__ float4 tile[2][32];
    int lane = threadIdx.x;
    float4 sum = make_float4(0, 0, 0, 0);
    cp_async_16(&tile[0][lane], in + 4 * lane);
    cp_async_commit();
    for (int i = 0; i < tiles; ++i) {
        if (i + 1 < tiles) cp_async_16(&tile[(i + 1) % 2][lane], in + 128 * (i + 1) + 4 * lane);
        cp_async_commit();
        if (wait) cp_async_wait<1>();
        __syncthreads();
        float4 v = tile[i % 2][lane ^ 1];
        sum.x += v.x;
        sum.y += v.y;
        sum.z += v.z;
        sum.w += v.w;
        __syncthreads();
    }
    reinterpret_cast<float4*>(out)[lane] = sum;
}

// One producer warp, the others consume: full and empty barriers, two stages. 0: right, 1: no wait for full, 2: no wait
// for empty, 3: too few bytes announced.
template <int fault> __global__ void pipeline(const float* in, float* out, int tiles) {
    extern __shared__ __align__(128) float stages[];
    __shared__ mbarrier_t full[2], empty[2];
    int warp = threadIdx.x / 32, consumers = blockDim.x - 32;
    if (threadIdx.x == 0) {
        for (int s = 0; s < 2; ++s) {
            mbarrier_init(&full[s], 1);
            mbarrier_init(&empty[s], consumers);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    if (warp == 0) {
        if (threadIdx.x == 0)
            for (int i = 0; i < tiles; ++i) {
                int s = i % 2;
                if (fault != 2) mbarrier_wait(&empty[s], (i / 2 + 1) % 2);
                mbarrier_arrive_expect_bytes(&full[s], consumers * (fault == 3 ? 2 : 4));
                bulk_copy(stages + s * consumers, in + i * consumers, consumers * 4, &full[s]);
            }
        return;
    }
    int me = threadIdx.x - 32;
    float sum = 0;
    for (int i = 0; i < tiles; ++i) {
        int s = i % 2;
        if (fault != 1) mbarrier_wait(&full[s], i / 2 % 2);
        sum += stages[s * consumers + (me + 1) % consumers];
        mbarrier_arrive(&empty[s]);
    }
    out[me] = sum;
}

// Warps 0 and 1 hand a number to warps 2 and 3 through a named barrier.
extern "C" __global__ void handover(float* out) {
    __shared__ float box[64];
    int i = threadIdx.x;
    if (i < 64) {
        box[i] = float(i);
        named_barrier_arrive(1, 128);
    } else {
        named_barrier_sync(1, 128);
        out[i - 64] = box[127 - i];
    }
}

// Every block adds its part, and the block that comes last adds them up: fences order what the counter announces.
template <bool fence> __global__ void last_block_sums(const float* in, float* parts, unsigned* count, float* total) {
    __shared__ bool last;
    float sum = warp_sum(in[blockIdx.x * 32 + threadIdx.x]);
    if (threadIdx.x == 0) {
        parts[blockIdx.x] = sum;
        if (fence) __threadfence();
        last = atomicAdd(count, 1u) == gridDim.x - 1;
        if (fence) __threadfence();
    }
    __syncthreads();
    if (last) {
        float all = 0;
        for (int i = 0; i < gridDim.x; ++i) all += parts[i];
        if (threadIdx.x == 0) *total = all;
    }
}

// All blocks meet, then each reads what its neighbour wrote.
extern "C" __global__ void grid_barrier(float* data, float* out, unsigned* count) {
    __shared__ float keep;
    if (threadIdx.x == 0) keep = data[blockIdx.x] = float(blockIdx.x + 1);
    __syncthreads();
    if (threadIdx.x == 0) {
        red_add_release(count, 1);
        while (ld_acquire(count) < gridDim.x) {
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) out[blockIdx.x] = data[(blockIdx.x + 1) % gridDim.x] + 100 * keep;
}

// in[stride * lane] from shared memory.
template <typename T> __global__ void banks(float* out, int stride) {
    extern __shared__ __align__(128) float stages[];
    for (int i = threadIdx.x; i < 2048; i += 32) stages[i] = 1.0f;
    __syncwarp();
    T v = reinterpret_cast<const T*>(stages)[stride * threadIdx.x];
    out[threadIdx.x] = *reinterpret_cast<const float*>(&v);
}

struct Sizes {
    int rows, cols;
    float scale;
};
extern "C" __global__ void by_value(const __grid_constant__ Sizes s, float* out, half h, bool yes, long long big) {
    out[0] = s.rows * s.cols * s.scale;
    out[1] = __half2float(h);
    out[2] = yes;
    out[3] = float(big);
}

extern "C" __global__ void half_written(float* out) {
    if (threadIdx.x % 2 == 0) out[threadIdx.x] = 1.0f;
}
extern "C" __global__ void reads_output(float* out) { out[threadIdx.x] += 1.0f; }
extern "C" __global__ void two_places(float* out) {
    if (threadIdx.x < 32) __syncthreads();  // here
    else __syncthreads();  // or there
    out[threadIdx.x] = 0.0f;
}
extern "C" __global__ void not_in_mask(float* out) {
    out[threadIdx.x] = __shfl_xor_sync(0x0000ffffu, 1.0f, 1);
}
extern "C" __global__ void divergent_deadlock(float* out) {
    if (threadIdx.x < 32) __syncthreads();
    else named_barrier_sync(3, 128);
    out[threadIdx.x] = 0.0f;
}
extern "C" __global__ void endless(float* out) {
    volatile float* v = out;
    while (v[0] == 0.0f) {
    }
}
extern "C" __global__ void writes_through(float* out) { out[threadIdx.x] = 1.0f; }
extern "C" __global__ void deep(float* out, int n) {
    volatile float local[65536];
    for (int i = 0; i < n; ++i) local[i] = out[0];
    out[0] = local[n - 1];
}
extern "C" __global__ void past_shared(float* out, int i) {
    extern __shared__ __align__(128) float stages[];
    stages[i] = 1.0f;
    out[0] = stages[i];
}
"""
WORDS = WORDS.replace(
    "// a: 16 x 16 and b",
    """__device__ void multiply_tile(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], half) {
    mma_16x8x16_f16(d, a, b);
}
__device__ void multiply_tile(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], nv_bfloat16) {
    mma_16x8x16_bf16(d, a, b);
}
// a: 16 x 16 and b""",
).replace("    if (sizeof(T) == 2 && T(1.0f) == __half2float(__ushort_as_half(0x3c00))) {}\n", "")
NAMES = [
    *"warp_words bit_words halves rounded half_fma atomics transposed handover grid_barrier by_value".split(),
    *"half_written reads_output two_places not_in_mask divergent_deadlock endless writes_through deep".split(),
    *"past_shared multiply<half> multiply<nv_bfloat16> ring<true> ring<false>".split(),
    *(f"pipeline<{i}>" for i in range(4)),
    *"last_block_sums<true> last_block_sums<false> banks<float> banks<float2> banks<float4>".split(),
]


@pytest.fixture(scope="module")
def words():
    return simt.compile(WORDS, NAMES, filename="words.cu")


def line_of(text: str) -> int:
    return next(i for i, row in enumerate(WORDS.splitlines(), 1) if text in row)


def both(kernel, grid, block, args, **options):
    """Runs the fast build, then the observed one, on the same arguments; the observed one must be clean."""
    kernel.launch(grid, block, args, **options)
    fast = [a.clone() for a in args if isinstance(a, torch.Tensor)]
    report = simt.observe(kernel.launch, grid, block, args, **options)
    assert report.clean, str(report)
    for a, b in zip(fast, (a for a in args if isinstance(a, torch.Tensor)), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_shuffles_and_votes(words):
    v = np.random.default_rng(0).integers(-1000, 1000, 32, dtype=np.int32)
    out = np.zeros((32, 16), np.uint32)
    words["warp_words"].launch(1, 32, (v, out))
    u, lane = v.astype(np.uint32), np.arange(32)
    ballot = sum(1 << i for i in range(32) if v[i] > 0)
    match = [sum(1 << j for j in range(32) if v[i] & 3 == v[j] & 3) for i in range(32)]
    assert (out[:, 0] == u[(lane & ~7) + 3]).all()
    assert (out[:, 1] == u[np.where(lane % 16 < 2, lane, lane - 2)]).all()
    assert (out[:, 2] == u[np.where(lane + 5 > 31, lane, (lane + 5) % 32)]).all()
    assert (out[:, 3] == u[lane ^ 9]).all()
    assert (out[:, 4] == ballot).all()
    assert (out[:, 5] == 1).all()
    assert (out[:, 6] == np.array(match, np.uint32)).all()
    assert (out[:, 7] == np.uint32(v.sum() & 0xFFFFFFFF)).all()
    assert (out[:, 8] == np.uint32(int(v.min()) & 0xFFFFFFFF)).all()
    assert (out[:, 9] == u.max()).all()
    assert (out[:, 10] == 0xFFFFFFFF).all()
    assert (out[:, 11] == u[np.where(lane < 16, lane ^ 1, lane ^ 2)]).all()
    assert (out[:, 12] == u[lane ^ 1]).all()
    positive = v[lane ^ 1] >= 0
    assert (out[positive, 13] == u[lane ^ 1][positive]).all()
    assert (out[:, 14] == out[:, 7]).all()
    assert (out[:, 15] == (v > 0).sum()).all()


def test_bit_operations(words):
    data = np.random.default_rng(1).integers(0, 2**32, (64, 3), dtype=np.uint32)
    out = np.zeros((64, 12), np.uint32)
    words["bit_words"].launch(1, 64, (data, out))
    mask = 0xFFFFFFFF
    for (a, b, c), got in zip(data.tolist(), out.tolist(), strict=True):
        pair = b << 32 | a
        signed = [x - (x >> 31 << 32) for x in (a, b, c)]
        nibbles = [(c >> 4 * i) & 7 for i in range(4)]
        dot = sum(np.int8(np.uint8(a >> 8 * i & 255)).item() * np.int8(np.uint8(b >> 8 * i & 255)).item() for i in range(4))
        assert got[0] == sum((pair >> 8 * n & 255) << 8 * i for i, n in enumerate(nibbles))
        assert got[1] == (pair << (c & 31)) >> 32 & mask
        assert got[2] == pair >> (c & 31) & mask
        assert got[3] == (signed[2] + dot) & mask
        assert got[4] == (c + sum((a >> 8 * i & 255) * (b >> 8 * i & 255) for i in range(4))) & mask
        assert got[5] == (b & (~a | c) & ~(a & ~c) & mask | a & c & ~b & mask) & mask or True
        assert got[7] == int(f"{a:032b}"[::-1], 2)
        assert got[8] == a * b >> 32
        assert got[9] == min(a, b) ^ (max(signed[0], signed[1]) & mask)
        assert got[10] == (b & 0xFFFF) << 16 | a & 0xFFFF
        assert got[11] == a
        want = 0
        for bit in range(32):  # the truth table itself
            index = (a >> bit & 1) << 2 | (b >> bit & 1) << 1 | (c >> bit & 1)
            want |= (0xE2 >> index & 1) << bit
        assert got[5] == want


def test_every_half_and_bfloat16_converts_as_in_torch(words):
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    as_half, as_bf16 = torch.empty(65536), torch.empty(65536)
    back = torch.zeros(65536, 2, dtype=torch.int16)
    words["halves"].launch(256, 256, (bits, as_half, as_bf16, back))
    for kind, got, column in ((torch.float16, as_half, 0), (torch.bfloat16, as_bf16, 1)):
        exact = bits.view(kind).float()
        assert torch.equal(torch.isnan(exact), torch.isnan(got))
        assert torch.equal(exact[~exact.isnan()], got[~exact.isnan()])
        assert torch.equal(back[~exact.isnan(), column], bits[~exact.isnan()])
        assert back[exact.isnan(), column].view(kind).isnan().all()


def test_rounding_to_short_floats_is_to_nearest_even(words):
    make = torch.Generator().manual_seed(2)
    pattern = torch.randint(-(2**31), 2**31, (40000,), generator=make, dtype=torch.int64).to(torch.int32).view(torch.float32)
    # Numbers at and beside the middle between two halves, subnormal ones included.
    middle = (torch.arange(0, 65536, 7, dtype=torch.int32).to(torch.int16).view(torch.float16).float() * (1 + 2**-11))
    x = torch.cat([pattern, middle, torch.nextafter(middle, torch.zeros(1)), torch.linspace(0, 2**-23, 4001)])
    halves, bf16s = (torch.zeros(len(x), dtype=torch.int16) for _ in range(2))
    words["rounded"].launch((len(x) + 255) // 256, 256, (x, halves, bf16s, len(x)))
    ok = ~x.isnan()
    assert torch.equal(halves[ok], x[ok].half().view(torch.int16))
    assert torch.equal(bf16s[ok], x[ok].bfloat16().view(torch.int16))
    assert halves[~ok].view(torch.float16).isnan().all() and bf16s[~ok].view(torch.bfloat16).isnan().all()


def test_a_fused_multiply_add_of_halves_rounds_once(words):
    make = np.random.default_rng(3)
    a, b, c = (make.integers(0, 65536, 6000, dtype=np.uint16).view(np.float16) for _ in range(3))
    # And sums whose exact value lies a hair off the middle of two halves: rounding twice would go wrong.
    a[:3], b[:3], c[:3] = [1 + 2**-10, 2049 / 2048, 3], [1 + 2**-10, 1, 2**-11], [2**-24, 2**-24, 1]
    finite = np.isfinite(a) & np.isfinite(b) & np.isfinite(c)
    out = np.zeros_like(a)
    words["half_fma"].launch(12, 256, (a, b, c, out, 3000))
    for x, y, z, got in zip(a[finite], b[finite], c[finite], out[finite], strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        assert nearest_half(exact) == abs(float(got)) * (-1 if exact < 0 else 1), (x, y, z)


def nearest_half(exact: Fraction) -> float:
    magnitude = abs(exact)
    if not magnitude:
        return 0.0
    power = max(-14, magnitude.numerator.bit_length() - magnitude.denominator.bit_length())
    if power > -14 and Fraction(2) ** power > magnitude:
        power -= 1
    step = Fraction(2) ** (max(power, -14) - 10)
    value = round(magnitude / step) * step  # Python rounds a tie to even
    return (-1 if exact < 0 else 1) * (float(value) if value < 65520 else float("inf"))


def test_atomics_add_up_over_all_blocks(words):
    i, f = torch.tensor([0, 0, -5000], dtype=torch.int32), torch.zeros(1)
    u, h = torch.zeros(4, dtype=torch.int32), torch.zeros(2, dtype=torch.float16)
    words["atomics"].launch(5, 64, (i, u, f, h))
    assert i.tolist() == [-320, -63, -937]
    assert u.tolist() == [320, -1, 7, 9]
    assert f.item() == 160 and h.tolist() == [320, 640]


@pytest.mark.parametrize("dtype,name", [(torch.float16, "half"), (torch.bfloat16, "nv_bfloat16")])
def test_mma_and_ldmatrix_follow_the_fragment_layout(words, dtype, name):
    make = torch.Generator().manual_seed(4)
    a, b = (torch.randn(s, generator=make).to(dtype) for s in ((16, 16), (16, 8)))
    d = torch.full((16, 8), float("nan"))
    both(words[f"multiply<{name}>"], 1, 32, (a, b, d))
    torch.testing.assert_close(d.double(), a.double() @ b.double(), rtol=1e-6, atol=1e-6)


def test_transposed_ldmatrix(words):
    data, out = torch.arange(256, dtype=torch.int16), torch.zeros(256, dtype=torch.int16)
    both(words["transposed"], 1, 32, (data, out))
    assert torch.equal(out.view(4, 8, 8), data.view(4, 8, 8).transpose(1, 2))


def test_cp_async_lands_at_its_wait_and_not_before(words):
    data, out = torch.randn(5, 128), torch.full((128,), float("nan"))
    both(words["ring<true>"], 1, 32, (data, out, 5))
    swapped = data.sum(0).view(16, 2, 4).flip(1).reshape(-1)
    torch.testing.assert_close(out, swapped)
    words["ring<false>"].launch(1, 32, (data, out, 5))
    assert out.isnan().all()  # wrong every time, not once in a thousand
    report = simt.observe(words["ring<false>"].launch, 1, 32, (data, out, 5))
    assert any(f.what == "asynchronous copy still in flight" for f in report.findings)


def test_bulk_copies_complete_an_mbarrier_by_bytes(words):
    data, out = torch.randn(7, 64), torch.full((64,), float("nan"))
    both(words["pipeline<0>"], 1, 96, (data, out, 7), shared_bytes=512)
    torch.testing.assert_close(out, data.sum(0).roll(-1), rtol=1e-5, atol=1e-5)
    report = simt.observe(words["pipeline<0>"].launch, 1, 96, (data, out, 7), shared_bytes=512)
    assert report.totals.async_copies == 7 and report.totals.async_sectors == 7 * 64 * 4 // 32


def test_a_pipeline_that_does_not_wait_for_its_data_is_wrong_every_time(words):
    data, out = torch.randn(2, 64), torch.zeros(64)
    words["pipeline<1>"].launch(1, 96, (data, out, 2), shared_bytes=512)
    assert out.isnan().all()
    report = simt.observe(words["pipeline<1>"].launch, 1, 96, (data, out, 2), shared_bytes=512)
    assert any(f.kind == "racecheck" and f.line == line_of("sum += stages[s") for f in report.findings)


def test_a_pipeline_that_overruns_its_consumers_is_caught(words):
    data, out = torch.randn(7, 64), torch.zeros(64)
    report = simt.observe(words["pipeline<2>"].launch, 1, 96, (data, out, 7), shared_bytes=512)
    assert [(f.kind, f.what) for f in report.findings] == [("synccheck", "too many arrivals")]
    assert report.findings[0].line == line_of("mbarrier_arrive_expect_bytes(&full")


def test_an_mbarrier_that_is_told_too_few_bytes_is_a_deadlock_with_the_numbers(words):
    data, out = torch.randn(7, 64), torch.zeros(64)
    with pytest.raises(simt.LaunchError, match=r"lacks 0 arrivals and -\d+ bytes") as caught:
        words["pipeline<3>"].launch(1, 96, (data, out, 7), shared_bytes=512)
    assert any(f"words.cu:{line_of('mbarrier_wait(&full')}" in wait for f in caught.value.findings for wait in f.waits)


def test_named_barriers_order_memory(words):
    out = torch.full((64,), float("nan"))
    both(words["handover"], 1, 128, (out,))
    assert torch.equal(out, torch.arange(63, -1, -1.0))


def test_fences_and_atomics_order_blocks_and_without_them_it_is_a_race(words):
    data, total = torch.randn(4, 32), torch.zeros(1)

    def args():
        return data, torch.zeros(4), torch.zeros(1, dtype=torch.int32), total

    report = simt.observe(words["last_block_sums<true>"].launch, 4, 32, args())
    torch.testing.assert_close(total[0], data.sum())
    assert report.clean, str(report)
    report = simt.observe(words["last_block_sums<false>"].launch, 4, 32, args())
    assert {f.kind for f in report.findings} == {"racecheck"}


@pytest.mark.parametrize("observed", [False, True])
def test_a_cooperative_launch_lets_blocks_wait_for_each_other(words, observed):
    data, out, count = torch.zeros(12), torch.zeros(12), torch.zeros(1, dtype=torch.int32)
    with simt.observing() if observed else pytest.MonkeyPatch.context() as report:
        words["grid_barrier"].launch(12, 64, (data, out, count), cooperative=True)
    expected = torch.arange(2, 14.0)
    expected[-1] = 1
    assert torch.equal(out, expected + 100 * torch.arange(1, 13.0))
    assert not observed or report.clean, str(report)


def test_a_grid_barrier_without_a_cooperative_launch_is_reported_and_does_not_hang(words):
    data, out, count = torch.zeros(12), torch.zeros(12), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(simt.LaunchError, match="cooperative"):
        words["grid_barrier"].launch(12, 64, (data, out, count), workers=1)


@pytest.mark.parametrize(
    "kind,stride,wavefronts",
    [
        ("float", 1, 1), ("float", 2, 2), ("float", 32, 32), ("float", 33, 1), ("float", 0, 1),
        ("float2", 1, 2), ("float2", 2, 4), ("float4", 1, 4), ("float4", 2, 8), ("float4", 8, 32),
    ],
)  # fmt: skip
def test_bank_conflicts_are_counted_in_wavefronts(words, kind, stride, wavefronts):
    out = torch.zeros(32)
    report = simt.observe(words[f"banks<{kind}>"].launch, 1, 32, (out, stride), shared_bytes=8192)
    load = next(e for e in report.lines if e.space == "shared" and e.how == "load")
    assert (load.requests, load.wavefronts) == (1, wavefronts)


class Sizes(ctypes.Structure):
    _fields_ = [("rows", ctypes.c_int), ("cols", ctypes.c_int), ("scale", ctypes.c_float)]


def test_structs_halves_and_bools_are_passed_by_value(words):
    out = torch.zeros(4)
    both(words["by_value"], 1, 1, (Sizes(3, 5, 0.5), out, np.float16(1.5), True, -(2**40)))
    assert out.tolist() == [7.5, 1.5, 1.0, float(-(2**40))]


# ---- what the observers say ----


def test_an_output_that_is_not_wholly_written_is_reported(words):
    report = simt.observe(words["half_written"].launch, 1, 32, (torch.zeros(32),), outputs=["out"])
    assert [f.what for f in report.findings] == ["output not written"]
    assert "64 of the 128 bytes of `out`" in report.findings[0].message


def test_reading_an_output_before_it_is_written_is_reported(words):
    report = simt.observe(words["reads_output"].launch, 1, 32, (torch.zeros(32),), outputs=[0])
    assert [(f.kind, f.line) for f in report.findings] == [("initcheck", line_of("void reads_output"))]


def test_a_barrier_reached_from_two_places_is_reported(words):
    report = simt.observe(words["two_places"].launch, 1, 64, (torch.zeros(64),))
    (finding,) = report.findings
    assert finding.kind == "synccheck" and {finding.line, finding.other_line} == {line_of("// here"), line_of("// or there")}


def test_a_lane_outside_its_own_mask_is_refused_in_both_builds(words):
    with pytest.raises(simt.LaunchError, match="lane 16 .* does not name it"):
        words["not_in_mask"].launch(1, 32, (torch.zeros(32),))
    report = simt.observe(words["not_in_mask"].launch, 1, 32, (torch.zeros(32),))
    assert report.stopped and report.findings[0].kind == "synccheck"


def test_a_deadlock_says_who_waits_where(words):
    with pytest.raises(simt.LaunchError) as caught:
        words["divergent_deadlock"].launch(1, 64, (torch.zeros(64),))
    (finding,) = caught.value.findings
    assert finding.kind == "deadlock" and len(finding.waits) == 2
    line = line_of("void divergent_deadlock")
    assert f"words.cu:{line + 1}: 32 threads" in finding.waits[0] and "32 of 64" in finding.waits[0]
    assert f"words.cu:{line + 2}: 32 threads" in finding.waits[1] and "named barrier 3" in finding.waits[1]


@pytest.mark.parametrize("observed", [False, True])
def test_a_loop_without_end_is_stopped(words, monkeypatch, observed):
    monkeypatch.setenv("NANOQWEN_SIMT_TIME_LIMIT", "0.5")
    out = torch.zeros(1)
    if observed:
        report = simt.observe(words["endless"].launch, 1, 1, (out,))
        assert report.stopped and report.findings[0].line == line_of("while (v[0]")
    else:
        with pytest.raises(simt.LaunchError, match="loop that never ends"):
            words["endless"].launch(1, 1, (out,))


def test_a_null_pointer_is_an_error_and_not_the_end_of_python(words):
    with pytest.raises(simt.LaunchError, match="memory that is not there"):
        words["writes_through"].launch(1, 1, (None,))
    report = simt.observe(words["writes_through"].launch, 1, 1, (None,))
    assert report.findings[0].kind == "memcheck" and "null pointer" in report.findings[0].message


def test_too_much_local_memory_is_an_error_and_not_the_end_of_python(words):
    with pytest.raises(simt.LaunchError, match="local memory"):
        words["deep"].launch(1, 1, (torch.zeros(1), 65536))


def test_shared_memory_past_the_launch_size_is_reported(words):
    for index, clean in ((15, True), (16, False)):
        report = simt.observe(words["past_shared"].launch, 1, 1, (torch.zeros(1), index), shared_bytes=64)
        assert report.clean == clean, str(report)


def test_memory_next_to_a_view_is_out_of_bounds(words):
    whole = torch.zeros(64)
    report = simt.observe(words["writes_through"].launch, 1, 32, (whole[16:40],))
    assert report.findings[0].kind == "memcheck" and "`out` (96 bytes)" in report.findings[0].message
    assert whole.sum() == 24 and whole[40:].sum() == 0


def test_the_order_of_turns_does_not_change_a_correct_kernel(words):
    data = torch.randn(7, 64)
    for seed in (1, 2, 3):
        out = torch.full((64,), float("nan"))
        with simt.observing(seed=seed) as report:
            words["pipeline<0>"].launch(1, 96, (data, out, 7), shared_bytes=512)
        assert report.clean, str(report)
        torch.testing.assert_close(out, data.sum(0).roll(-1), rtol=1e-5, atol=1e-5)


# ---- launches that a GPU would refuse ----

Y = torch.zeros(32)


@pytest.mark.parametrize(
    "grid,block,args,options,error,words_in_it",
    [
        (0, 32, (Y,), {}, ValueError, "grid.x is 0"),
        (1, 0, (Y,), {}, ValueError, "block.x is 0"),
        (1, 1025, (Y,), {}, ValueError, "1025.*1024"),
        (1, (32, 33), (Y,), {}, ValueError, "1056 threads.*1024"),
        (1, (1, 1, 65), (Y,), {}, ValueError, "block.z is 65.*64"),
        ((1, 65536), 32, (Y,), {}, ValueError, "grid.y is 65536.*65535"),
        ((1, 1, 65536), 32, (Y,), {}, ValueError, "grid.z is 65536.*65535"),
        (1, 32, (Y,), {"shared_bytes": 227 * 1024 + 1}, ValueError, "232449.*232448"),
        (1, 32, (Y,), {"shared_bytes": 65537, "shared_limit": 65536}, ValueError, "65537.*65536"),
        (1, 32, (Y,), {"shared_bytes": -1}, ValueError, "-1"),
        (1, 32, (), {}, TypeError, r"takes 1 arguments \(out\), got 0"),
        (1, 32, (Y, 1), {}, TypeError, "takes 1 arguments"),
        (1, 32, (3.0,), {}, TypeError, r"argument 0 \(out\) .* must be a tensor"),
        (1, 32, (torch.zeros(4, 4).T[:, :2],), {}, ValueError, "not contiguous"),
        (1.5, 32, (Y,), {}, TypeError, "grid"),
        (1, (1, 1, 1, 1), (Y,), {}, TypeError, "block"),
    ],
)
def test_a_launch_that_a_gpu_would_refuse_is_refused(words, grid, block, args, options, error, words_in_it):
    with pytest.raises(error, match=words_in_it):
        words["writes_through"].launch(grid, block, args, **options)


@pytest.mark.parametrize(
    "value,error",
    [(2.5, TypeError), (True, TypeError), (2**31, ValueError), (np.int64(3), TypeError), (np.uint32(3), TypeError),
     (ctypes.c_longlong(3), TypeError), (ctypes.c_uint(3), TypeError), ("3", TypeError), (None, TypeError)],
)  # fmt: skip
def test_a_scalar_must_have_the_kernels_type(words, value, error):
    with pytest.raises(error, match=r"argument 1 \(n\) of deep .*32-bit signed integer"):
        words["deep"].launch(1, 1, (Y, value))


def test_an_unknown_kernel_name_is_a_key_error(words):
    with pytest.raises(KeyError, match="no kernel 'gemm'"):
        words["gemm"]
