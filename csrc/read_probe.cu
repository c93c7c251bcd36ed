// Read probe: how fast can this GPU read its own memory?
//
//   the values of sums add up to Σ over i of in[i].x + in[i].y + in[i].z + in[i].w   (mod 2^32)
//
// Bytes:   reads 16 · n, each once; writes 4 a thread (under 0.1 % at 4 GiB).
// Launch:  256 threads a block, as many blocks as the SMs hold at once; any n ≥ 0.
// Teaches: a load takes some 600 ns to come back, so bandwidth needs many in flight. Each thread asks for four
//          16-byte words before it needs the first, and a warp's four requests are 2 KB in a row, which DRAM
//          serves from pages that it has open. The sums are stored, so that no load can be optimised away, and
//          they add up to the sum of the whole buffer: proof that every byte was read.

extern "C" __global__ void __launch_bounds__(256)
read_probe(const uint4* __restrict__ in, long long n, unsigned int* __restrict__ sums) {
    constexpr int LOADS = 4;
    const long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const long long step = (long long)gridDim.x * blockDim.x * LOADS;
    unsigned int sum = 0;
    for (long long i = thread / 32 * 32 * LOADS + thread % 32; i < n; i += step) {
        uint4 words[LOADS];
#pragma unroll
        for (int k = 0; k < LOADS; ++k) {
            words[k] = i + 32 * k < n ? __ldcs(in + i + 32 * k) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int k = 0; k < LOADS; ++k) {
            sum += words[k].x + words[k].y + words[k].z + words[k].w;
        }
    }
    sums[thread] = sum;
}
