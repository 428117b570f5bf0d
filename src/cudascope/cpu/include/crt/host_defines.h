// NVIDIA's headers include it, and find its words in simt/language.h.
