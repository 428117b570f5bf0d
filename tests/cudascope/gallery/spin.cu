__global__ void limited_count(int* lock, int* total) {
    while (atomicCAS(lock, 0, 1) != 0) {}
    __threadfence();
    if (*total < 3) {
        *total += 1;
        __threadfence();
        atomicExch(lock, 0);
    }
}
