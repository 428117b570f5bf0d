// Inline PTX: what translate/ptx calls for the instructions of an asm statement.
#pragma once

#include "ptx_floats.h"
#include "ptx_functions.h"
#include "ptx_matrix.h"
#include "ptx_memory.h"
#include "ptx_warp.h"
#include "ptx_wgmma.h"
#include "ptx_wmma.h"
