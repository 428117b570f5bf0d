// Stand-ins for what kernels use most of cub: reductions, scans, loads, stores and exchanges.
#pragma once

#include "block/block_load.cuh"
#include "block/block_reduce.cuh"
#include "block/block_scan.cuh"
