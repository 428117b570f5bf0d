// Inline PTX: what simt/ptx calls for the instructions of an asm statement.
#pragma once

#include "simt_ptx_floats.h"
#include "simt_ptx_functions.h"
#include "simt_ptx_matrix.h"
#include "simt_ptx_memory.h"
#include "simt_ptx_warp.h"
#include "simt_ptx_wgmma.h"
#include "simt_ptx_wmma.h"
