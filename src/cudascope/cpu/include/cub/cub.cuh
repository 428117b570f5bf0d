// Stand-ins for what kernels use most of cub: reductions, scans, sorts, loads, stores and exchanges.
#pragma once

#include "block/block_discontinuity.cuh"
#include "block/block_load.cuh"
#include "block/block_radix_sort.cuh"
#include "block/block_raking_layout.cuh"
#include "block/block_reduce.cuh"
#include "block/block_scan.cuh"
