int twice(int n) {
    int new = 2 * n; /* no C++ */
    return new;
}
