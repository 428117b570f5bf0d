#include "operators.cuh"
