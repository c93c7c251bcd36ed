"""Find the last batch at which the fused kernel is at least as fast; what is wanted is the one after it.

From 64 tokens a call on, a call computes longer than it reads, and so does the library: the two then take the same
time for their arithmetic, and dequantising comes on top. A fused kernel that takes enough tokens never loses. (On
paper: it must also reach the library's share of the tensor cores, which is hard.)
"""

PACKED, SIXTEEN = 0.5 + (0.5 + 2) / 128, 2.0  # bytes a weight


def pays_from(tokens_a_call, spec, most=1024):
    def product(tokens, weight):
        return max(weight / spec.bandwidth, 2 * tokens / spec.bf16)

    def fused(batch):
        full, rest = divmod(batch, tokens_a_call)
        return full * product(tokens_a_call, PACKED) + (product(rest, PACKED) if rest else 0)

    def dequantise(batch):
        return (PACKED + SIXTEEN) / spec.bandwidth + product(batch, SIXTEEN)

    last = max((batch for batch in range(1, most + 1) if fused(batch) <= dequantise(batch)), default=0)
    return last + 1 if last < most else None
