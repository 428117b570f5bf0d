#error "cp.async (cuda_pipeline.h) runs on a GPU only: the CPU has no asynchronous copies"
