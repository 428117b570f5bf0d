// What NVIDIA's headers with types for half precision bring with them.
#include "cuda_bf16.h"
#include "cuda_fp16.h"
