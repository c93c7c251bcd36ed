// A kernel may include this header of the CUDA toolkit. Here its words come from simt/cuda.h, which is always there.
#pragma once
