// The barrier is for the lanes that wrote the page and clear its tail: one warp. Warp 1 never comes to it.
        if (warp == 0 && tokens < 16) {
            __syncwarp();
            if (lane >= tokens && lane < 16) page[lane] = make_float2(-1e30f, 0.0f);
        }
