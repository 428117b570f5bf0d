// What it declares is in simt.h.
