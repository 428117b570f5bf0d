#error "wmma (mma.h) runs on a GPU only: the CPU runner has no tensor cores"
