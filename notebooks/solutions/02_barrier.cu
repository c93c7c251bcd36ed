// The barrier moves behind the branch, so that the warps that read `total` wait for the one that writes it.
    if (warp == 0) {
        float all = warp_sum(lane < warps ? partial[lane] : 0.0f);
        if (lane == 0) total = all;
    }
    __syncthreads();  // here all warps pass
