// Read probe: how fast can this GPU read its own memory?
//
//   sums[t] = Σ over i ≡ t (mod T) of in[i].x + in[i].y + in[i].z + in[i].w   (mod 2^32), T threads in all
//
// Bytes:   reads 16 · n, each once; writes 4 · T (under 0.1 % at 4 GiB).
// Launch:  256 threads a block, as many blocks as the SMs hold at once; any n ≥ 0.
// Teaches: a load takes some 600 ns to come back, so bandwidth needs many in flight. Each thread asks for four
//          16-byte words before it needs the first; neighbouring lanes take neighbouring words, so that a warp's
//          request is 512 bytes in a row. The sums are stored, so that no load can be optimised away, and they
//          add up to the sum of the whole buffer: proof that every byte was read.

extern "C" __global__ void __launch_bounds__(256)
read_probe(const uint4* __restrict__ in, long long n, unsigned int* __restrict__ sums) {
    const long long threads = (long long)gridDim.x * blockDim.x;
    const long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    unsigned int sum = 0;
    long long i = thread;
    for (; i + 3 * threads < n; i += 4 * threads) {
        const uint4 a = in[i];
        const uint4 b = in[i + threads];
        const uint4 c = in[i + 2 * threads];
        const uint4 d = in[i + 3 * threads];
        sum += a.x + a.y + a.z + a.w;
        sum += b.x + b.y + b.z + b.w;
        sum += c.x + c.y + c.z + c.w;
        sum += d.x + d.y + d.z + d.w;
    }
    for (; i < n; i += threads) {
        const uint4 a = in[i];
        sum += a.x + a.y + a.z + a.w;
    }
    sums[thread] = sum;
}
