#pragma once
// NVRTC has threadIdx and its like built in; the host API is of no use in a kernel
