#error "the CPU runner has no cooperative groups: use __syncthreads and warp functions"
